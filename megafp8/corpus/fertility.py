"""How well a tokenizer suits a text: tokens for each byte, word and character, what it has no piece for, what it loses.

Counts are added up by language, from as many tasks as there are; `figures` makes the rates out of the sums. A word is
what `megafp8.corpus.words` takes for one, the same for all languages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megafp8.corpus.documents import Document
from megafp8.corpus.words import Words
from megafp8.data.tokenizer import Tokenizer
from megafp8.data.tokenizer_pieces import BYTE, UNKNOWN, Pieces, pieces_of

_BATCH = 64
_SHOWN = 24  # characters of a text around the place where it does not come back
OTHER = "(other)"
_MAX_LANGUAGES = 200

# Texts that some tokenizers lose something of; a corpus need not hold any of them, so they are only told about.
PROBES = {
    "capital letters and digits": "The 3 Quick Foxes, 1984 and 12,000.5",
    "runs of spaces": "a  b   c    d",
    "spaces at both ends": "  x ",
    "tabs": "\tif x:\n\t\treturn",
    "line ends": "one\ntwo\n\nthree\n",
    "line ends of Windows": "one\r\ntwo\r\n",
    "German": "Größe, Übermaß, ÄÖÜß",
    "Japanese": "吾輩は猫である。名前はまだ無い。",
    "composed accents": "café naïve",
    "decomposed accents": "cafe\u0301 nai\u0308ve",
    "wide letters and ligatures": "\uff21\uff22\uff11 \ufb01ne \u00bd",
    "joined emoji": "\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f469\U0001f3fd\u200d\U0001f680",
    "rare characters": "\U00020bb7\U0001f9ff \u2603 \u16a0",
    "code": "def f(x: int) -> str:\n    return f'{x:>8}'  # TODO\n",
}
ALWAYS = ("capital letters and digits", "line ends")  # no corpus is without these


@dataclass
class Counts:
    """Sums over the documents of a language.

    Attributes:
        characters: Unicode code points.
        byte_tokens: ids of bytes that are no whole character.
        split_characters: characters that are made of such.
        lossy_documents: their text does not come back.
    """

    documents: int = 0
    text_bytes: int = 0
    characters: int = 0
    words: int = 0
    tokens: int = 0
    byte_tokens: int = 0
    unknown_tokens: int = 0
    split_characters: int = 0
    lossy_documents: int = 0

    def add(self, other: Counts) -> None:
        """Add another's sums."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def figures(self) -> dict[str, Any]:
        """The sums, and what they come to."""
        tokens, characters = max(self.tokens, 1), max(self.characters, 1)
        return {
            **dataclasses.asdict(self),
            "tokens_per_byte": round(self.tokens / max(self.text_bytes, 1), 6),
            "tokens_per_word": round(self.tokens / max(self.words, 1), 6),
            "tokens_per_character": round(self.tokens / characters, 6),
            "bytes_per_token": round(self.text_bytes / tokens, 6),
            "byte_token_share": round(self.byte_tokens / tokens, 6),
            "unknown_share": round(self.unknown_tokens / tokens, 6),
            "covered_share": round(1 - self.split_characters / characters, 6),
        }


class Fertility:
    """Counts by language.

    Attributes:
        languages: {language, "" if unknown: counts}.
        first_loss: which document first did not come back, and where.
        used: bool [V]: ids that occurred.
    """

    def __init__(self, vocab_size: int = 0) -> None:
        self.languages: dict[str, Counts] = {}
        self.first_loss = ""
        self.used = np.zeros(vocab_size, np.bool_)

    def measure(self, tokenizer: Tokenizer, documents: Iterable[Document]) -> None:
        """Encode documents, decode them again, and count."""
        pieces = pieces_of(tokenizer)
        batch: list[Document] = []
        for document in documents:
            batch.append(document)
            if len(batch) == _BATCH:
                self._measure(tokenizer, pieces, batch)
                batch = []
        self._measure(tokenizer, pieces, batch)

    def _measure(self, tokenizer: Tokenizer, pieces: Pieces, batch: Sequence[Document]) -> None:
        for document, ids in zip(batch, tokenizer.encode_batch([one.text for one in batch])):
            text, array = document.text, np.asarray(ids, np.int64)
            kinds = pieces.kinds[array]
            loss = lost(tokenizer, text, ids)
            self._counts(document.language).add(
                Counts(
                    documents=1,
                    text_bytes=document.num_bytes,
                    characters=len(text),
                    words=Words(text).num_words,
                    tokens=len(array),
                    byte_tokens=int(np.count_nonzero(kinds == BYTE)),
                    unknown_tokens=int(np.count_nonzero(kinds == UNKNOWN)),
                    split_characters=int(pieces.split[array].sum()),
                    lossy_documents=int(bool(loss)),
                )
            )
            self.used[array] = True
            self.first_loss = self.first_loss or (loss and f"{document.id} {loss}")

    def _counts(self, language: str) -> Counts:
        if language not in self.languages and len(self.languages) >= _MAX_LANGUAGES:
            language = OTHER
        return self.languages.setdefault(language, Counts())

    def to_json(self) -> dict[str, Any]:
        """For a task's record."""
        return {
            "languages": {name: dataclasses.asdict(one) for name, one in sorted(self.languages.items())},
            "first_loss": self.first_loss,
        }

    def add_json(self, values: Mapping[str, Any]) -> None:
        """Add what `to_json` gave."""
        for name, counts in values["languages"].items():
            self._counts(name).add(Counts(**counts))
        self.first_loss = self.first_loss or values["first_loss"]

    @property
    def total(self) -> Counts:
        """Of all languages."""
        total = Counts()
        for one in self.languages.values():
            total.add(one)
        return total

    def figures(self) -> dict[str, Any]:
        """As the manifest has it: `all`, `languages` (each as `Counts.figures`), `first_loss`."""
        named = sorted(self.languages.items())
        return {
            "all": self.total.figures(),
            "languages": {name: one.figures() for name, one in named},
            "first_loss": self.first_loss,
        }


def lost(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> str:
    """Where a text does not come back, in words; "" if it does.

    SentencePiece writes a space as U+2581 and gives a literal U+2581 back as a space; that is known, and no loss here.
    """
    back = tokenizer.decode(ids)
    if back == text:
        return ""
    if tokenizer.kind == "sentencepiece":
        text = text.replace("\u2581", " ")
        if back == text:
            return ""
    at = next((i for i, (a, b) in enumerate(zip(text, back)) if a != b), min(len(text), len(back)))
    start = max(0, at - _SHOWN // 3)
    before, after = text[start : start + _SHOWN], back[start : start + _SHOWN]
    return f"at character {at}: {before!r} comes back as {after!r}"


def lost_probes(tokenizer: Tokenizer) -> list[str]:
    """Names of the PROBES that do not come back."""
    encoded = tokenizer.encode_batch(list(PROBES.values()))
    return [name for (name, text), ids in zip(PROBES.items(), encoded) if lost(tokenizer, text, ids)]
