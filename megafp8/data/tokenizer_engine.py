"""A faster encoder for the same ids: the package gigatoken for BPE models, behind guards, where it is installed.

The reference (sentencepiece, tokenizers) stays the definition, and the engine is used only as far as it agrees:

- at the start both encode the same few thousand texts; any difference, and the engine is not used;
- a text that spells a control piece (`</s>`, `<|endoftext|>`) goes to the reference, which takes it as text, where
  the engine would give the control id; so does a text whose ids hold a control id all the same, and one with a
  character that only newer versions of Unicode know, where a regular expression over Unicode's classes cuts texts;
- while it runs, one text in 256, chosen by its hash, is encoded by both; a difference is an error by which the
  caller encodes all of its work again by the reference, so that the outcome does not depend on who met it when.

The engine remembers every word that it meets, and never forgets: 0.6 to 2 MB of memory for each MB of new text. So it
is loaded anew after 64 MiB of text, which costs 0.06 seconds of about two.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from megafp8.core.errors import DataError, one_line
from megafp8.core.log import event, get_logger
from megafp8.data.marks import ENDS_ONLY, Marks
from megafp8.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megafp8.data.tokenizer_ranks import TiktokenTokenizer
from megafp8.data.unsettled import is_unsettled

_log = get_logger(__name__)
_CHECKED_EVERY = 256
_RENEWED_EVERY = 1 << 26  # bytes of text
_SCHEMES = {"gpt2": "gpt2", "r50k_base": "gpt2", "cl100k_base": "cl100k", "o200k_base": "o200k"}  # tiktoken's: ours
_PROBES = 3000
_FIXED_PROBES = (
    "", " ", "  ", "\n", "\r\n", "\t\tx", "\0", "a\0b", "\u2581", "a\u2581b", "  two  spaces\n\n\n\ttab \r\n",
    "日本語 \u3000全角 äöüß €", "e\u0301 é", "\ufeff\u200b\u200d\u2060", "\x85\u2028\u2029",
    "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0010ffff\ufdd0", "1234567890 \uff11\uff12\uff13", "don't DON'T I\u2019m",
    "<0x0A>", "def f(x):\n    return x  # \u2192\n", " " * 300, "\n" * 300, "x" * 300, "\u3042" * 300, "ab" * 200,
)  # fmt: skip

_Known = SentencePieceTokenizer | HuggingFaceTokenizer | TiktokenTokenizer


class EngineMismatchError(DataError):
    """The engine does not give the reference's ids for some text."""


@dataclass(frozen=True)
class _Controls:
    """Of one tokenizer: pieces that a text must not become by spelling them, and their ids.

    Attributes:
        by_classes: texts are cut by Unicode's classes of characters.
    """

    pieces: frozenset[str]
    ids: frozenset[int]
    by_classes: bool = True

    def guard(self) -> re.Pattern[str]:
        """Finds any of the pieces; what finds nothing, if there is none."""
        return re.compile("|".join(map(re.escape, sorted(self.pieces, key=lambda p: (-len(p), p)))) or r"(?!)")


class FastTokenizer:
    """A `Tokenizer` with the ids of `reference`; the engine does the work that it is known to do right.

    Attributes:
        engine_name: package and version, for records.
        reference: the tokenizer that defines the ids.
    """

    def __init__(self, reference: Tokenizer, make: Callable[[], Any], controls: _Controls, engine_name: str) -> None:
        self.reference, self._make, self.engine_name = reference, make, engine_name
        self._engine, self._bytes = make(), 0
        self.kind, self.fingerprint = reference.kind, reference.fingerprint
        self.vocab_size, self.eod_id, self.bos_id = reference.vocab_size, reference.eod_id, reference.bos_id
        self._guard, self._by_classes = controls.guard(), controls.by_classes
        self._is_control = np.zeros(reference.vocab_size, np.bool_)
        self._is_control[list(controls.ids)] = True

    def encode(self, text: str) -> list[int]:
        """As `Tokenizer.encode`; a single text is not worth the engine."""
        return self.reference.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """As `Tokenizer.decode`."""
        return self.reference.decode(ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `Tokenizer.encode_batch`.

        Raises:
            EngineMismatchError: a text that was encoded by both has other ids.
        """
        ids, lengths = self.encode_flat(texts)
        return [one.tolist() for one in np.split(ids, np.cumsum(lengths)[:-1])] if len(texts) else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts in a row, int64 number of ids of each).

        Raises:
            EngineMismatchError: a text that was encoded by both has other ids.
        """
        encoded = [text.encode("utf-8") for text in texts]
        guarded = {number for number, text in enumerate(texts) if self._guard.search(text)}
        if self._by_classes:
            guarded.update(number for number, data in enumerate(encoded) if is_unsettled(data))
        ids, offsets = self._run([b"" if number in guarded else data for number, data in enumerate(encoded)])
        if (found := np.flatnonzero(self._is_control[ids])).size:
            guarded.update((np.searchsorted(offsets, found, side="right") - 1).tolist())
        for number, text in enumerate(texts):
            if number not in guarded and _is_checked(encoded[number]):
                self._compare(text, ids[offsets[number] : offsets[number + 1]])
        return self._with_reference(texts, sorted(guarded), ids, offsets)

    def _run(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, offsets) of what the engine gives."""
        try:
            if self._bytes > _RENEWED_EVERY:
                self._engine, self._bytes = self._make(), 0
            self._bytes += sum(map(len, texts))
            layout = self._engine.encode_batch(texts, parallel=False).layout  # processes share the work, not threads
            ids, offsets = np.asarray(layout.content.data), np.asarray(layout.offsets.data)
        except BaseException as error:  # its panics are no Exception
            _raise_if_asked(error)
            raise EngineMismatchError(f"{self.engine_name} fails: {one_line(error)}") from None
        if len(offsets) != len(texts) + 1 or offsets[0] or int(ids.max(initial=0)) >= self.vocab_size:
            raise EngineMismatchError(f"{self.engine_name} gives {len(offsets) - 1} of {len(texts)} texts or odd ids")
        return ids[: offsets[-1]], offsets

    def _compare(self, text: str, ids: np.ndarray) -> None:
        if self.reference.encode(text) != ids.tolist():
            raise EngineMismatchError(f"{self.engine_name} gives other ids than {self.kind} for {text[:40]!r}...")

    def _with_reference(
        self, texts: Sequence[str], guarded: list[int], ids: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Put the reference's ids in the place of the engine's for `guarded`."""
        lengths = np.diff(offsets).astype(np.int64)
        if not guarded:
            return ids, lengths
        parts, begin = [], 0
        for number, theirs in zip(guarded, self.reference.encode_batch([texts[number] for number in guarded])):
            parts += [ids[begin : offsets[number]], np.asarray(theirs, ids.dtype)]
            begin, lengths[number] = offsets[number + 1], len(theirs)
        return np.concatenate([*parts, ids[begin:]]), lengths

    def prove(self, texts: Sequence[str]) -> None:
        """Compare all ids of texts with the reference's.

        Raises:
            EngineMismatchError: they differ.
        """
        ids, lengths = self.encode_flat(texts)
        for text, one, theirs in zip(texts, np.split(ids, np.cumsum(lengths)), self.reference.encode_batch(texts)):
            if one.tolist() != theirs:
                raise EngineMismatchError(f"{self.engine_name} gives other ids than {self.kind} for {text[:40]!r}")


def fast(reference: Tokenizer) -> Tokenizer:
    """`reference` with a faster encoder, or itself where there is none that gives its ids; a log line says why."""
    if not isinstance(reference, (SentencePieceTokenizer, HuggingFaceTokenizer, TiktokenTokenizer)):
        return reference
    try:
        import gigatoken  # optional: it only saves time
    except ImportError:
        event(_log, "encoding by the reference", kind=reference.kind, because="package gigatoken is not installed")
        return reference
    name = f"gigatoken {importlib.metadata.version('gigatoken')}"
    try:
        make = partial(_engine, gigatoken.Tokenizer, reference)
        tokenizer = FastTokenizer(reference, make, _controls(reference), name)
    except BaseException as error:  # its panics are no Exception
        _raise_if_asked(error)
        because = f"{name} cannot load it: {one_line(error)}"
        event(_log, "encoding by the reference", kind=reference.kind, because=because)
        return reference
    try:
        tokenizer.prove(list(_probes(reference)))
    except EngineMismatchError as error:
        event(_log, "encoding by the reference", level=30, kind=reference.kind, because=error)
        return reference
    return tokenizer


def _engine(maker: Any, reference: _Known) -> Any:
    """The engine for a reference."""
    if isinstance(reference, SentencePieceTokenizer):
        return maker.from_sentencepiece(reference.file_bytes)
    if isinstance(reference, HuggingFaceTokenizer):
        return maker.from_json(reference.definition)
    if reference.scheme not in _SCHEMES:
        raise ValueError(f"no fast way to cut text by {reference.pattern[:60]!r}")
    how = {"pretokenizer": _SCHEMES[reference.scheme], "special_tokens": reference.special_tokens}
    return maker.from_tiktoken(reference.path, **how)


def _controls(reference: _Known) -> _Controls:
    """What the engine must not make of a text."""
    if isinstance(reference, SentencePieceTokenizer):
        return _piece_controls(reference)
    if isinstance(reference, HuggingFaceTokenizer):
        return _added_controls(reference)
    return _Controls(frozenset(reference.special_tokens), frozenset(reference.special_tokens.values()))


def encode_documents(
    tokenizer: Tokenizer, texts: Sequence[str], marks: Marks = ENDS_ONLY
) -> tuple[np.ndarray, np.ndarray]:
    """(ids of texts in a row, each with its begin and end as `marks` says; number of ids of each, these counted).

    Both are integers, numbers of ids int64.

    Raises:
        EngineMismatchError: see `FastTokenizer.encode_flat`.
    """
    if isinstance(tokenizer, FastTokenizer):
        ids, lengths = tokenizer.encode_flat(texts)
    else:
        encoded = tokenizer.encode_batch(texts)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ids = np.fromiter(chain.from_iterable(encoded), np.int64, int(lengths.sum()))
    lengths = lengths + marks.add_bos + marks.append_eos
    out = np.full(int(lengths.sum()), tokenizer.eod_id, ids.dtype)
    is_text = np.ones(len(out), np.bool_)
    ends = np.cumsum(lengths)
    if marks.add_bos:
        out[ends - lengths] = tokenizer.bos_id
        is_text[ends - lengths] = False
    if marks.append_eos:
        is_text[ends - 1] = False
    out[is_text] = ids
    return out, lengths


def _is_checked(data: bytes) -> bool:
    """One text in 256, always the same ones, by the hash of their beginning."""
    return xxhash.xxh3_64_intdigest(data[:256]) % _CHECKED_EVERY == 0


def _piece_controls(reference: SentencePieceTokenizer) -> _Controls:
    """Pieces that are not normal; a byte's name (`<0x0A>`) is text when it is spelled, a user's symbol is a piece that
    the engine takes in another way where a text begins with it."""
    description: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")  # of the file's fields
    model = description.ModelProto.FromString(reference.file_bytes)
    types = model.SentencePiece
    odd = [(i, one) for i, one in enumerate(model.pieces) if one.type != types.NORMAL]
    never = (types.CONTROL, types.UNKNOWN, types.UNUSED)
    ids = frozenset(i for i, one in odd if one.type in never)
    return _Controls(frozenset(one.piece for _, one in odd) - {""}, ids, by_classes=False)


def _added_controls(reference: HuggingFaceTokenizer) -> _Controls:
    """Special added tokens, and those that take in what surrounds them, which is easily done otherwise."""
    added = json.loads(reference.definition).get("added_tokens", [])
    wide = ("lstrip", "rstrip", "single_word")
    pieces = frozenset(t["content"] for t in added if t["special"] or any(t.get(key) for key in wide))
    return _Controls(pieces - {""}, frozenset(t["id"] for t in added if t["special"]) | {reference.eod_id})


def _probes(reference: Tokenizer) -> Iterator[str]:
    """Texts that try all of a vocabulary's kinds of pieces, seeded."""
    yield from _FIXED_PROBES
    rng = random.Random(0)
    for _ in range(_PROBES):
        first, second = (rng.choices(range(reference.vocab_size), k=rng.randrange(10)) for _ in "ab")
        parts = (reference.decode(first), _character(rng), rng.choice(("", " ", "\n")), _character(rng))
        yield "".join((*parts, reference.decode(second)))


def _character(rng: random.Random) -> str:
    low, high = rng.choice(((1, 0x80), (0x80, 0x3000), (0x3000, 0xD800), (0xE000, 0x20000), (0x20000, 0x110000)))
    return chr(rng.randrange(low, high))


def _raise_if_asked(error: BaseException) -> None:
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)):
        raise error
