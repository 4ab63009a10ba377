"""Samples of all parts -> `model`, a SentencePiece model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megafp8.core.config import build
from megafp8.corpus.config import TokenizerConfig
from megafp8.corpus.documents import Document
from megafp8.corpus.language_groups import quotas
from megafp8.corpus.parts import read_part
from megafp8.corpus.tasks import Work
from megafp8.corpus.train_tokenizer import Sentences, draw_sample, train

VERSION = 2
MODEL = "model"


def run(work: Work) -> dict[str, Any]:
    """Documents and bytes that it was trained on, in all and by language group, and what the trainer needed changed."""
    config = build(TokenizerConfig, work.values["tokenizer"])
    sample = draw_sample(_documents(work), budgets=quotas(config), seed=work.values["seed"])
    sentences = Sentences(sample.texts)
    work.output(MODEL).write_bytes(train(sentences, config))
    return {
        "sample_documents": len(sample.texts),
        "sample_bytes": sum(sample.group_bytes.values()),
        "sample_languages": sample.group_bytes,
        "sample_cuts": sentences.num_cuts,
        "sample_replaced": sentences.num_replaced,
    }


def _documents(work: Work) -> Iterator[Document]:
    for number in range(len(work.inputs)):
        for document, _ in read_part(work.checked(number)):
            yield document
