"""Token ids of a whole corpus, through the pipeline, against the packages that define them: every kind, all text.

The text is not part of the repository; without it the tests are skipped. Some 10 minutes in all on 2 CPUs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers

from megafp8.core.config import build
from megafp8.corpus.config import CorpusConfig, SourceConfig, TokenizerConfig
from megafp8.corpus.documents import Document, parse, split_of
from megafp8.corpus.identity import open_source
from megafp8.corpus.run import preprocess
from megafp8.corpus.train_tokenizer import Sentences, draw_sample, train
from megafp8.data.indexed import IndexedDataset
from megafp8.data.tokenizer import load_tokenizer
from megafp8.data.tokenizer_pieces import byte_letters

DATA = Path(__file__).parents[4] / "shared" / "data"
FILES = [str(DATA / "bench-*.jsonl.zst"), str(DATA / "heldout-*.jsonl.zst")]
LLAMA3 = (  # how Llama 3's tokenizer.json cuts text, a public fact of its format
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BATCH = 512
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there"),
]
Encode = Callable[[list[str]], list[list[int]]]


def documents() -> Iterator[Document]:
    config = SourceConfig(kind="jsonl", files=tuple(FILES))
    for record in open_source(config).records():
        found = parse(record, config)
        assert isinstance(found, Document) and not found.is_empty
        yield found


@pytest.fixture(scope="module")
def sample() -> list[str]:
    """6 MB, a third of each language."""
    return draw_sample(documents(), budgets=dict.fromkeys(("en", "de", "ja"), 2_000_000), seed=1).texts


def sentencepiece_model(folder: Path, sample: list[str], algorithm: Any) -> tuple[Path, Encode]:
    config = TokenizerConfig(vocab_size=8000, algorithm=algorithm, symbols=("<tool>",), control_symbols=("<|x|>",))
    path = folder / "tokenizer.model"
    path.write_bytes(train(Sentences(sample), config))
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return path, partial(model.encode, num_threads=2)


def byte_level(sample: list[str], split: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = split, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<|end_of_text|>", "<|begin_of_text|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def huggingface_json(folder: Path, sample: list[str], scheme: str) -> tuple[Path, Encode]:
    pre = tokenizers.pre_tokenizers
    split = pre.ByteLevel(add_prefix_space=False)
    if scheme == "llama3":
        cut = pre.Split(tokenizers.Regex(LLAMA3), "isolated")
        split = pre.Sequence([cut, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    byte_level(sample, split).save(str(folder / "tokenizer.json"))
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.encode_special_tokens = True
    return folder / "tokenizer.json", lambda texts: [one.ids for one in reference.encode_batch(texts)]


def tiktoken_ranks(folder: Path, sample: list[str], scheme: str) -> tuple[Path, Encode]:
    tiktoken = pytest.importorskip("tiktoken")
    letters = byte_letters()
    vocabulary = byte_level(sample, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)).get_vocab()
    pieces = [(bytes(letters[c] for c in piece), i - 2) for piece, i in vocabulary.items() if i >= 2]
    path = folder / "tokenizer.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(piece) + f" {rank}\n".encode() for piece, rank in sorted(pieces)))
    special = {"<|endoftext|>": 8000, "<|begin_of_text|>": 8001}
    (folder / "tokenizer.tiktoken.json").write_text(json.dumps({"pattern": scheme, "special_tokens": special}))
    loaded: Any = load_tokenizer(path)
    package = tiktoken.Encoding("x", pat_str=loaded.pattern, mergeable_ranks=dict(pieces), special_tokens=special)
    return path, partial(package.encode_ordinary_batch, num_threads=2)


def plain_bytes(folder: Path, sample: list[str], scheme: str) -> tuple[str, Encode]:
    return "bytes", lambda texts: [[byte + 4 for byte in text.encode()] for text in texts]


@pytest.mark.parametrize("add_bos", [False, True], ids=["ends", "both"])
@pytest.mark.parametrize(
    ("make", "scheme"),
    [
        (sentencepiece_model, "bpe"),
        (sentencepiece_model, "unigram"),
        (huggingface_json, "gpt2"),
        (huggingface_json, "llama3"),
        (tiktoken_ranks, "cl100k_base"),
        (plain_bytes, ""),
    ],
)
def test_ids_of_all_documents(
    tmp_path: Path, sample: list[str], make: Callable[..., tuple[Any, Encode]], scheme: str, add_bos: bool
) -> None:
    if add_bos and make is not plain_bytes and scheme != "bpe":
        pytest.skip("how documents are marked does not depend on the package")
    spec, encode = make(tmp_path, sample, scheme)
    values = {
        "source": {"kind": "jsonl", "files": FILES},
        "split": {"valid_share": 0.05},
        "tokenizer": {"path": str(spec), "add_bos": add_bos},
        "output": {"folder": str(tmp_path / "out"), "workers": 2, "keep_stages": False},
    }
    config = build(CorpusConfig, values)
    report = preprocess(config).manifest["tokenizer_report"]
    assert report["all"]["lossy_documents"] == 0 and set(report["languages"]) == {"en", "de", "ja"}
    sets = {name: IndexedDataset(tmp_path / "out" / name) for name in ("train", "valid")}
    places, tokenizer = dict.fromkeys(sets, 0), load_tokenizer(spec)
    remaining = documents()
    while batch := list(islice(remaining, _BATCH)):
        for document, ids in zip(batch, encode([one.text for one in batch])):
            name = split_of(document.text, config.split)
            found = np.asarray(sets[name].document(places[name]))
            expected = [*[tokenizer.bos_id] * add_bos, *ids, tokenizer.eod_id]
            assert found.tolist() == expected, f"{document.id}, document {places[name]} of {name}"
            places[name] += 1
    assert places == {name: one.num_documents for name, one in sets.items()} and sum(places.values()) == 15_625
