"""`megafp8 tokenizer report`: several tokenizers on the same sample of a text, by language."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megafp8.core.errors import DataError
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Document, Skipped, is_wanted, parse
from megafp8.corpus.fertility import Fertility, lost_probes
from megafp8.corpus.identity import open_source
from megafp8.corpus.train_tokenizer import Lowest, sample_hash
from megafp8.data.tokenizer import identity, load_tokenizer
from megafp8.data.tokenizer_engine import EngineMismatchError, fast

_MAX_LANGUAGES = 200


@dataclass(frozen=True)
class TextSample:
    """Documents that all tokenizers are tried on, and what the whole input held."""

    documents: list[Document]
    num_documents: int
    num_bad: int
    first_bad: str


def draw(config: SourceConfig, *, sample_bytes: int, seed: int) -> TextSample:
    """Of each language the documents of smallest hash, up to `sample_bytes`; one pass over the input.

    Raises:
        DataError: no document.
    """
    languages: dict[str, Lowest] = {}
    bad: list[Bad] = []
    counts = {"documents": 0, "bad": 0}
    for document in _documents(config, bad, counts):
        name = document.language
        name = name if name in languages or len(languages) < _MAX_LANGUAGES else ""
        lowest = languages.setdefault(name, Lowest(sample_bytes))
        lowest.add(sample_hash(document.utf8, seed), document)
    if not languages:
        raise DataError(f"no documents in {', '.join(config.files)} ({counts['bad']} bad records)")
    chosen = [document for name in sorted(languages) for _, document in languages[name].ordered()]
    return TextSample(chosen, counts["documents"], counts["bad"], str(bad[0]) if bad else "")


def _documents(config: SourceConfig, bad: list[Bad], counts: dict[str, int]) -> Iterator[Document]:
    for record in open_source(config).records():
        found = parse(record, config)
        if isinstance(found, Bad):
            counts["bad"] += 1
            bad[:] = bad or [found]
        elif found is not None and not isinstance(found, Skipped) and not found.is_empty and is_wanted(found, config):
            counts["documents"] += 1
            yield found


def report(specs: Sequence[str], sample: TextSample) -> list[dict[str, Any]]:
    """For each tokenizer `spec`, `identity`, `lost_probes`, `vocabulary_used` (a share), and `Fertility.figures`.

    Raises:
        DataError: no such tokenizer.
    """
    rows = []
    for spec in specs:
        tokenizer = fast(load_tokenizer(spec))
        found = Fertility(tokenizer.vocab_size)
        try:
            found.measure(tokenizer, sample.documents)
        except EngineMismatchError:
            found = Fertility(tokenizer.vocab_size)
            found.measure(getattr(tokenizer, "reference", tokenizer), sample.documents)
        rows.append(
            {
                "spec": spec,
                "identity": identity(tokenizer),
                "lost_probes": lost_probes(tokenizer),
                "vocabulary_used": round(float(found.used.mean()), 6),
                **found.figures(),
            }
        )
    return rows
