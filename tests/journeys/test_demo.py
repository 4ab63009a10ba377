"""The demo's six commands at a small size, in the demo's order, by the tools that a user calls."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.journeys.runs import ROOT, losses, megafp8, overrides, records


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("demo")


def test_from_raw_text_to_an_exported_model(folder):
    corpus = [
        ROOT / "examples/tiny_cpu/corpus.toml",
        *overrides(source__source_bytes=100_000, tokenizer__vocab_size=1024, output__folder=folder / "corpus"),
    ]
    megafp8("tokenizer", "train", *corpus)
    megafp8("preprocess", *corpus)
    assert "already done" in megafp8("preprocess", *corpus).stdout
    side = json.loads((folder / "corpus/train.json").read_text())
    assert side["tokenizer"]["vocab_size"] == 1024 and 4 < side["unigram_entropy_nats"] < 6.93  # ln 1024

    model = overrides(
        model__num_layers=2, model__hidden_size=64, model__ffn_hidden_size=128, model__head_dim=16,
        model__vocab_size=1024, model__max_sequence_length=64, data__sequence_length=64,
        data__train=f'[{{ path = "{folder}/corpus/train" }}]', data__valid=f'[{{ path = "{folder}/corpus/valid" }}]',
        data__tokenizer=folder / "corpus/tokenizer.model", train__steps=30, train__eval_samples=16,
        train__compile="off", optimizer__warmup_steps=3, checkpoint__interval=0, log__fp8_interval=5,
    )  # fmt: skip
    runs = {"none": folder / "bf16", "delayed": folder / "fp8"}
    for recipe, run in runs.items():
        words = [*model, *overrides(precision__recipe=recipe, run__dir=run)]
        megafp8("pretrain", ROOT / "examples/tiny_cpu/pretrain.toml", "--nproc", "2", *words)
        curve = losses(run)
        assert curve[-1] < curve[0] - 0.5 and len(curve) == 30
    a, b = (records(run, "eval")[-1]["loss"] for run in runs.values())
    assert abs(a - b) < 0.1  # the E4M3 grid's noise, far below what 30 steps teach

    done = megafp8("report", *runs.values(), "--out", folder / "report", "--title", "Two precisions")
    page = (folder / "report/report.html").read_text()
    assert "report.html" in done.stdout and "Two precisions" in page
    assert not re.search(r'(src|href)="https?://', page), "the page must open offline"

    done = megafp8("convert", "--to", "hf", runs["delayed"], folder / "hf")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (folder / "hf").iterdir()}
    assert "logit" in done.stdout
    (folder / "corpus/tokenizer.model").rename(folder / "corpus/moved.model")  # the run has a copy of its own
    done = megafp8("generate", runs["delayed"], "--prompt", "Return the", "--max-new-tokens", "8")
    assert done.stdout.startswith("Return the")
    (folder / "corpus/moved.model").rename(folder / "corpus/tokenizer.model")
    done = megafp8("eval", "--perplexity", runs["none"], "--data", folder / "corpus/valid")
    assert "perplexity" in done.stdout
