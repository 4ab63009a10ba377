"""Trains a SentencePiece model on a sample of the train split, the same bytes every time.

The sample is the documents with the smallest hashes, as many as fit `train_bytes` (or a language's share of it), in the
order of their hashes: it depends on what the corpus holds, not on the order of files, and takes one pass and no more
memory than the sample.

The model keeps the text: no Unicode normalization, all white space (indentation and line ends have pieces), bytes for
what has no piece. Ids 0 to 3 are unk, bos, eos (which ends documents) and pad.
"""

from __future__ import annotations

import heapq
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import sentencepiece

from megafp8.core.errors import DataError
from megafp8.corpus.config import TokenizerConfig
from megafp8.corpus.documents import Document, text_hash
from megafp8.corpus.language_groups import group_of
from megafp8.corpus.round_scores import round_scores

_RESERVED = {0: " ", 0x2585: " "}
_SENTENCE_CHARACTERS = 16_384  # longer documents are cut at line ends: a "sentence" is what merges cannot cross
# part of the result: unigram's sums depend on how sentences are dealt to threads, so it is no knob
_THREADS = 2


@dataclass(frozen=True)
class Sample:
    """Texts to train on, the bytes of each language group in it, and how many documents and bytes there were in all."""

    texts: list[str]
    group_bytes: dict[str, int]
    num_documents: int
    num_bytes: int


def sample_hash(text: str | bytes, seed: int) -> int:
    """64 bits that decide whether a text is in the sample; another hash than that of the split."""
    return text_hash(text, (seed + 1) % 2**64)


class Lowest:
    """The documents of smallest hash that fit a budget (at least one), whatever the order in which they come.

    Attributes:
        held: bytes of text.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._heap: list[tuple[int, int, Document]] = []  # negative hashes: the largest hash comes out first
        self._limit = 2**64  # what did not fit keeps out all behind it, or the sample would depend on the order
        self._count = 0
        self.held = 0

    def add(self, number: int, document: Document) -> None:
        """Take a document of hash `number`, if there is none smaller in its place."""
        if number > self._limit:
            return
        self.held += document.num_bytes
        self._count += 1
        heapq.heappush(self._heap, (-number, self._count, document))
        while self.held > self._max_bytes and len(self._heap) > 1:
            largest, _, last = heapq.heappop(self._heap)
            self._limit = -largest
            self.held -= last.num_bytes

    def ordered(self) -> list[tuple[int, Document]]:
        """(hash, document), smallest first."""
        largest_first = sorted(self._heap, key=lambda one: one[:2])
        return [(-number, document) for number, _, document in reversed(largest_first)]


def draw_sample(documents: Iterable[Document], *, budgets: Mapping[str, int], seed: int) -> Sample:
    """Keep, of each language group, the documents of smallest hash up to its budget of UTF-8 bytes (at least one)."""
    groups = {name: Lowest(max_bytes) for name, max_bytes in budgets.items()}
    total = count = 0
    for document in documents:
        count, total = count + 1, total + document.num_bytes
        if (group := group_of(document.language, groups)) is not None:
            groups[group].add(sample_hash(document.utf8, seed), document)
    chosen = sorted(((number, one.text) for group in groups.values() for number, one in group.ordered()))
    return Sample([text for _, text in chosen], {name: one.held for name, one in groups.items()}, count, total)


class Sentences:
    """Texts as the trainer takes them: none is left out, none is too long.

    Texts are cut at line ends into pieces of at most 16,384 characters, within a line only where it is longer. NUL, by
    which the trainer ends a string, and U+2585, for which it leaves a whole sentence out, are replaced by spaces.

    Attributes:
        num_cuts: places within a line; merges do not cross them.
        num_replaced: characters.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.num_cuts = self.num_replaced = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            start = 0
            while start < len(text):
                stop = start + _SENTENCE_CHARACTERS
                if stop < len(text):
                    at_line = text.rfind("\n", start, stop)
                    self.num_cuts += at_line < start
                    stop = at_line + 1 if at_line >= start else stop
                piece = text[start:stop]
                kept = piece.translate(_RESERVED)
                self.num_replaced += 0 if kept == piece else sum(map(piece.count, "\0\u2585"))
                yield kept
                start = stop


def train(sentences: Sentences, config: TokenizerConfig) -> bytes:
    """A SentencePiece model file.

    Raises:
        DataError: too little text for the vocabulary (with the largest that works), or too many characters for it.
    """
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=out,
            model_type=config.algorithm,
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=config.split_digits,
            split_by_unicode_script=config.split_scripts,
            split_by_whitespace=config.split_words,
            max_sentencepiece_length=config.max_piece_length,
            user_defined_symbols=list(config.symbols),
            control_symbols=list(config.control_symbols),
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
    return round_scores(out.getvalue()) if config.algorithm == "unigram" else out.getvalue()


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
