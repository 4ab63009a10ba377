"""A sample of what a task of `tokenize` reads: does its text come back, how many tokens does each language take?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megafp8.core.errors import is_fault
from megafp8.corpus.documents import Document, text_hash
from megafp8.corpus.fertility import Fertility
from megafp8.corpus.intake import sampled
from megafp8.corpus.parts import read_view
from megafp8.corpus.stages.tokenize import name_failing, task_tokenizer
from megafp8.corpus.tasks import Work
from megafp8.data.tokenizer import Tokenizer
from megafp8.data.tokenizer_engine import EngineMismatchError

VERSION = 1


def run(work: Work) -> dict[str, Any]:
    """`languages`: counts of `fertility.Counts` by language; `first_loss`."""
    tokenizer = task_tokenizer(work.hints["tokenizer"], work.values["tokenizer"])
    try:
        return _measured(tokenizer, work)
    except EngineMismatchError:
        return _measured(getattr(tokenizer, "reference", tokenizer), work)


def _measured(tokenizer: Tokenizer, work: Work) -> dict[str, Any]:
    found = Fertility(tokenizer.vocab_size)
    try:
        found.measure(tokenizer, _sample(work))
    except EngineMismatchError:
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        name_failing(tokenizer, _sample(work))
        raise
    return found.to_json()


def _sample(work: Work) -> Iterator[Document]:
    """The first document and those whose hash (of the text, or of the line) is below the limit."""
    seed, limit = work.values["seed"], work.values["limit"]

    def is_chosen(row: int, data: bytes) -> bool:
        return not row or text_hash(data, seed) < limit

    if "source" in work.values:
        yield from sampled(work, is_chosen)
    else:
        yield from (document for _, document, _ in read_view(work, is_chosen))
