"""Drops documents that are shorter or longer than given numbers of characters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.documents import Document, Dropped


@config_dataclass
class Length:
    """Limits on the length of a text; characters are Unicode code points, white space included."""

    min_characters: Annotated[int, Field(ge=0, description="shorter documents are dropped")] = 0
    max_characters: Annotated[int, Field(ge=0, description="longer documents are dropped; 0: no limit")] = 0

    version = 1  # raise it when `apply` changes

    def __post_init__(self) -> None:
        if 0 < self.max_characters < self.min_characters:
            raise ValueError(f"max_characters {self.max_characters} is below min_characters {self.min_characters}")

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "length"

    def apply(self, document: Document) -> Document | Dropped:
        """The document, or that it is too short or too long."""
        count = len(document.text)
        if count < self.min_characters:
            return Dropped("too short", f"{count} characters")
        if 0 < self.max_characters < count:
            return Dropped("too long", f"{count} characters")
        return document


STEP = Length
