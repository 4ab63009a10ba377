"""Exact duplicates: documents whose normalised texts have the same 128-bit hash (xxh3)."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import numpy as np
import xxhash
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.dedup.records import TEXT

Ignored = Literal["space", "case"]


def normal(text: str, ignore: Sequence[str]) -> bytes:
    """What of a text is compared: Unicode NFC; runs of white space as one blank, and case folded, where ignored."""
    if "case" in ignore:
        text = text.casefold()
    text = unicodedata.normalize("NFC", text)
    return (" ".join(text.split()) if "space" in ignore else text).encode("utf-8", "surrogatepass")


def text_records(texts: Iterable[bytes], numbers: np.ndarray) -> np.ndarray:
    """Records of normalised texts with given document numbers."""
    digests = b"".join(xxhash.xxh3_128_digest(text) for text in texts)
    found = np.empty(len(numbers), TEXT)
    halves = np.frombuffer(digests, ">u8").reshape(-1, 2)
    found["key"], found["low"], found["document"] = halves[:, 0], halves[:, 1], numbers
    return found


@config_dataclass
class Exact:
    """What may differ between texts that count as the same."""

    ignore: Annotated[
        tuple[Ignored, ...], Field(description='of "space" (how much, and which), "case": what makes no difference')
    ] = ("space",)

    version = 1
    reason = "exact duplicate"
    unit = "document"
    dtype = TEXT

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "exact"

    def records(self, texts: Sequence[str], first: int) -> tuple[np.ndarray, int]:
        """A record for each document, and the number behind the last."""
        behind = first + len(texts)
        return text_records((normal(text, self.ignore) for text in texts), np.arange(first, behind)), behind


STEP = Exact
