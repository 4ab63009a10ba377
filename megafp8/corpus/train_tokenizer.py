"""Trains a SentencePiece model on a sample of the train split, the same bytes every time.

The sample is the documents with the smallest hashes, as many as fit `train_bytes`, in the order of their hashes: it
depends on what the corpus holds, not on the order of files, and takes one pass and no more memory than the sample.

The model keeps the text: no Unicode normalization, all white space (indentation and line ends have pieces), bytes for
what has no piece. Ids 0 to 3 are unk, bos, eos (which ends documents) and pad.
"""

from __future__ import annotations

import heapq
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import sentencepiece

from megafp8.core.errors import DataError
from megafp8.corpus.config import TokenizerConfig
from megafp8.corpus.documents import Document, text_hash

_SENTENCE_CHARACTERS = 16_384  # longer documents are cut at line ends: a "sentence" is what merges cannot cross
# part of the result: unigram's sums depend on how sentences are dealt to threads, so it is no knob
_THREADS = 2


@dataclass(frozen=True)
class Sample:
    """Texts to train on, and how many documents and bytes the train split has in all."""

    texts: list[str]
    num_documents: int
    num_bytes: int


def sample_hash(text: str | bytes, seed: int) -> int:
    """64 bits that decide whether a text is in the sample; another hash than that of the split."""
    return text_hash(text, (seed + 1) % 2**64)


def draw_sample(documents: Iterable[Document], *, max_bytes: int, seed: int) -> Sample:
    """Keep the documents of smallest hash up to `max_bytes` of UTF-8 (at least one document)."""
    heap: list[tuple[int, str]] = []  # negative hashes: the largest hash comes out first
    total = held = count = 0
    limit = 2**64  # what did not fit keeps out all behind it, or the sample would depend on the order of documents
    for document in documents:
        size = document.num_bytes
        count, total = count + 1, total + size
        if (number := sample_hash(document.utf8, seed)) > limit:
            continue
        held += size
        heapq.heappush(heap, (-number, document.text))
        while held > max_bytes and len(heap) > 1:
            number, text = heapq.heappop(heap)
            limit = -number
            held -= len(text.encode("utf-8"))
    return Sample([text for _, text in sorted(heap, reverse=True)], count, total)


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """Texts cut into pieces of at most 16,384 characters, at line ends where there are any."""
    for text in texts:
        start = 0
        while start < len(text):
            stop = start + _SENTENCE_CHARACTERS
            if stop < len(text):
                at_line = text.rfind("\n", start, stop)
                stop = at_line + 1 if at_line >= start else stop
            yield text[start:stop].replace("\0", " ")  # the trainer takes a NUL for the end of the string
            start = stop


def train(texts: Iterable[str], config: TokenizerConfig) -> bytes:
    """A SentencePiece model file.

    Raises:
        DataError: too little text for the vocabulary (with the largest that works), or too many characters for it.
    """
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(texts),
            model_writer=out,
            model_type=config.algorithm,
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=8 * _SENTENCE_CHARACTERS,  # bytes; longer ones would be left out with a warning only
            train_extremely_large_corpus=config.train_bytes > 1_000_000_000,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(_explain(str(error), config.vocab_size)) from None
    return out.getvalue()


def _explain(message: str, vocab_size: int) -> str:
    if largest := re.search(r"value <= (\d+)", message):
        return (
            f"tokenizer.vocab_size {vocab_size} is too large for this text; the largest that works is "
            f"{largest[1]}, or give more text"
        )
    if needed := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"tokenizer.vocab_size {vocab_size} is too small for this text's characters; give at least {needed[1]}, "
            "or lower tokenizer.character_coverage"
        )
    if "sentences_.empty()" in message:
        return "no text to train a tokenizer on: every document is empty or in the validation split"
    return f"SentencePiece cannot train on this text: {message.strip().splitlines()[0]}"
