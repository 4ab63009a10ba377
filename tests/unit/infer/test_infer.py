"""Models come back from checkpoints as they were; generation and scores are exact, seeded, free of batching."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from megafp8.core.errors import CheckpointError, ConfigError, DataError
from megafp8.data import IndexedDataset, IndexedDatasetWriter
from megafp8.data.tokenizer import load_tokenizer
from megafp8.infer.documents import DocumentWindows, score_documents
from megafp8.infer.generate import Sampling, generate
from megafp8.infer.score import Score, Windows, score
from megafp8.infer.sources import dataset_tokens, text_tokens
from megafp8.infer.weights import build_model, load_model
from tests.unit.infer.models import config_of, masters_of, save_model

BYTES = load_tokenizer("bytes")


@pytest.fixture(scope="module")
def model():
    config = config_of(num_kv_heads=2)
    return build_model(config, masters_of(config))


@pytest.mark.parametrize("fields", [{}, {"tied_embeddings": True}, {"family": "gpt"}, {"family": "qwen3"}], ids=str)
def test_a_checkpoint_comes_back_as_the_same_model(tmp_path, fields):
    config = config_of(**fields)
    masters = masters_of(config)
    save_model(tmp_path / "run" / "checkpoints", config, tensors=masters)
    loaded = load_model(tmp_path / "run", dtype=torch.float32)
    assert loaded.config == config and loaded.sequence_length == 64 and loaded.tokenizer.kind == "bytes"
    assert {n: torch.equal(p, masters[n]) for n, p in loaded.model.named_parameters()} == dict.fromkeys(masters, True)
    half = load_model(tmp_path / "run", dtype=torch.bfloat16).model
    assert all(torch.equal(p, masters[n].bfloat16()) for n, p in half.named_parameters())


def test_what_is_wrong_is_named(tmp_path):
    config, masters = config_of(), masters_of(config_of())
    with pytest.raises(CheckpointError, match=r"missing: final_norm.weight"):
        build_model(config, {n: t for n, t in masters.items() if n != "final_norm.weight"})
    with pytest.raises(CheckpointError, match=r"unknown: extra"):
        build_model(config, {**masters, "extra": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"output.weight has shape \(1, 2\), not \(260, 32\)"):
        build_model(config, {**masters, "output.weight": torch.zeros(1, 2)})
    path = save_model(tmp_path / "a", config, tokenizer="bytes")
    with pytest.raises(DataError, match="name where it is now with --tokenizer"):
        load_model(path, tokenizer=tmp_path / "moved.model")
    with pytest.raises(CheckpointError, match="no such folder"):
        load_model(tmp_path / "nowhere")


def test_greedy_takes_the_likeliest_of_the_whole_text_each_time(model):
    ids = [5, 80, 200]
    for _ in range(8):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert generate(model, [ids[:3]], max_new_tokens=8) == [ids[3:]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_neighbours(model, temperature):
    prompts = [[5, 80, 200], [7], [9, 9, 9, 9, 9]]
    together = generate(model, prompts, max_new_tokens=6, sampling=Sampling(temperature, seed=11))
    # Row numbers steer the noise, so rows before it stay; fillers of other lengths change the padding.
    for row in range(3):
        before = [[1]] * row
        alone = generate(model, [*before, prompts[row]], max_new_tokens=6, sampling=Sampling(temperature, seed=11))
        assert alone[row] == together[row]


def test_sampling_is_seeded_and_follows_the_distribution(model):
    prompts = [[5, 80]] * 4000
    first = generate(model, prompts, max_new_tokens=1, sampling=Sampling(1.5, seed=1))
    assert first == generate(model, prompts, max_new_tokens=1, sampling=Sampling(1.5, seed=1))
    assert first != generate(model, prompts, max_new_tokens=1, sampling=Sampling(1.5, seed=2))
    with torch.no_grad():
        wanted = torch.softmax(model(torch.tensor([[5, 80]]))[0, -1].double() / 1.5, -1)
    got = torch.bincount(torch.tensor(first)[:, 0], minlength=260).double() / 4000
    # Total variation of n draws from k outcomes: mean at most sqrt(k / n) / 2 = 0.127, and it hardly spreads.
    assert float((got - wanted).abs().sum() / 2) < 0.13


def test_stops_at_the_end_of_document(model):
    (whole,) = generate(model, [[5, 80, 200]], max_new_tokens=8)
    end = whole[3]
    assert generate(model, [[5, 80, 200]], max_new_tokens=8, eod_id=end) == [whole[: whole.index(end)]]


def test_refuses_what_cannot_be_continued(model):
    with pytest.raises(ConfigError, match="exceed the model's 96 positions; ask for at most 93"):
        generate(model, [[1, 2, 3]], max_new_tokens=94)
    with pytest.raises(ConfigError, match="a prompt without tokens"):
        generate(model, [[1], []], max_new_tokens=1)
    with pytest.raises(ConfigError, match="token id 260"):
        generate(model, [[260]], max_new_tokens=1)
    with pytest.raises(ConfigError, match="must not be negative"):
        generate(model, [[1]], max_new_tokens=-1)
    with pytest.raises(ConfigError, match="top_p 0 lies above 0"):
        Sampling(top_p=0)


def test_score_is_the_sum_over_every_token_once(model):
    ids = np.random.default_rng(0).integers(0, 260, 200)
    got = score(model, Windows(ids, length=32, batch=3))
    wanted = 0.0
    with torch.no_grad():
        for start in range(0, 199, 32):
            part = torch.tensor(ids[start : start + 33])
            wanted += float(cross_entropy(model(part[None, :-1])[0].double(), part[1:], reduction="sum"))
    assert got.tokens == 199
    # fp32 sums of 199 losses of about 10 in another order: 199 * 10 * 2^-24 * sqrt(260) terms = 0.002 at most
    assert got.loss_sum == pytest.approx(wanted, abs=2e-3)
    assert got.perplexity == pytest.approx(math.exp(got.loss))


def test_windows_count_themselves():
    for tokens in (0, 1, 2, 32, 33, 34, 97):
        windows = Windows(np.arange(tokens), length=32, batch=2)
        batches = list(windows)
        assert len(batches) == len(windows)
        targets = torch.cat([t[t >= 0] for _, t in batches]) if batches else torch.empty(0)
        assert targets.tolist() == list(range(1, tokens))


def test_bits_per_byte():
    assert Score(8 * math.log(2), 3).bits_per_byte(4) == pytest.approx(2.0)
    assert Score(1e6, 1).perplexity == math.inf and math.isnan(Score(0.0, 0).loss)


def test_a_dataset_and_its_text_score_the_same(tmp_path, model):
    text = "Scoring reads each token once. " * 8
    (tmp_path / "a.txt").write_text(text)
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(np.array([BYTES.eod_id, *BYTES.encode(text)]))
    data = dataset_tokens(tmp_path / "a", BYTES)
    ids, num_bytes = text_tokens(tmp_path / "a.txt", BYTES)
    assert list(data[0 : len(data)]) == list(ids) and num_bytes == len(text)
    a, b = (score(model, Windows(tokens, length=64, batch=2)) for tokens in (data, ids))
    assert a == b and a.tokens == len(text)
    assert len(dataset_tokens(tmp_path / "a", BYTES, 10)) == 10 and text_tokens(tmp_path / "a.txt", BYTES, 10)[1] == 0
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="holds no text"):
        text_tokens(tmp_path / "empty.txt", BYTES)


def test_documents_are_scored_one_by_one(tmp_path, model):
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 260, size).tolist() for size in (5, 64, 1, 100)]
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        for ids in documents:
            writer.add_document(np.array(ids))
    dataset = IndexedDataset(tmp_path / "a")
    windows = DocumentWindows(dataset, BYTES.eod_id, length=32, batch=3)
    got = score_documents(model, windows, 4)
    assert got.tokens.tolist() == [5, 64, 1, 100] and len(windows) == 3  # 1 + 2 + 1 + 4 windows, three at once
    for ids, loss_sum in zip(documents, got.loss_sums):
        alone = score(model, Windows(np.array([BYTES.eod_id, *ids]), length=32, batch=1))
        # fp32 sums of up to 100 losses of about 10 in another order: 100 * 10 * 2^-24 * sqrt(260) at most
        assert loss_sum == pytest.approx(alone.loss_sum, abs=1e-3)
    few = DocumentWindows(dataset, BYTES.eod_id, length=32, batch=3, max_tokens=6)
    assert few.sizes.tolist() == [5, 64]
    with pytest.raises(ConfigError, match="token id"):
        with IndexedDatasetWriter(tmp_path / "b", np.uint16) as writer:
            writer.add_document(np.array([300]))
        score_documents(model, DocumentWindows(IndexedDataset(tmp_path / "b"), 0, length=32, batch=1), 1)
