"""Samples of all parts -> `model`, a SentencePiece model."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.core.config import build
from megafp8.corpus.config import TokenizerConfig
from megafp8.corpus.documents import Document
from megafp8.corpus.parts import read_part
from megafp8.corpus.tasks import Work
from megafp8.corpus.train_tokenizer import draw_sample, train

VERSION = 1
MODEL = "model"


def run(work: Work) -> dict[str, int]:
    """Documents and bytes that it was trained on."""
    config = build(TokenizerConfig, work.values["tokenizer"])
    sample = draw_sample(_documents(work), max_bytes=config.train_bytes, seed=work.values["seed"])
    work.output(MODEL).write_bytes(train(sample.texts, config))
    return {
        "sample_documents": len(sample.texts),
        "sample_bytes": sum(len(text.encode("utf-8")) for text in sample.texts),
    }


def _documents(work: Work) -> Iterator[Document]:
    for number in range(len(work.inputs)):
        for document, _ in read_part(work.checked(number)):
            yield document
