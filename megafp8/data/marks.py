"""Which control ids stand around a document: the policy that a corpus is written by, trained on and asked with.

It is recorded beside the identity of the tokenizer in each side file, from there in each checkpoint. Nothing else adds
such ids: those that a tokenizer would add by rules of its own are never asked for, so that none stands twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megafp8.core.errors import DataError
from megafp8.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Marks:
    """A begin id before each document, an end id behind it, or both."""

    add_bos: bool = False
    append_eos: bool = True

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Marks:
        """Out of the `tokenizer` entry of a side file or checkpoint; what says nothing has ends only, as ours had."""
        return cls(record.get("add_bos", False), record.get("append_eos", True))

    def to_json(self) -> dict[str, bool]:
        """For such an entry."""
        return {"add_bos": self.add_bos, "append_eos": self.append_eos}

    def check(self, tokenizer: Tokenizer, name: str) -> None:
        """Raise DataError if a tokenizer cannot follow it."""
        if self.add_bos and tokenizer.bos_id < 0:
            raise DataError(
                f"{name}: has no begin id, but tokenizer.add_bos is on; name one as bos_token in tokenizer_config.json "
                "beside it, or turn add_bos off"
            )
        if self.add_bos and self.append_eos and tokenizer.bos_id == tokenizer.eod_id:
            raise DataError(
                f"{name}: begins and ends documents with the same id {tokenizer.eod_id}, which would stand twice "
                "between two of them; turn tokenizer.add_bos or tokenizer.append_eos off"
            )

    def before(self, tokenizer: Tokenizer) -> list[int]:
        """Ids before a document."""
        return [tokenizer.bos_id] if self.add_bos else []

    def after(self, tokenizer: Tokenizer) -> list[int]:
        """Ids behind it."""
        return [tokenizer.eod_id] if self.append_eos else []

    def context(self, tokenizer: Tokenizer) -> int:
        """The id that stood before the first id of a text in training: its begin, or the end of the document before."""
        return tokenizer.bos_id if self.add_bos else tokenizer.eod_id

    def __str__(self) -> str:
        begin, end = ("begin id, " if self.add_bos else ""), (", end id" if self.append_eos else "")
        return f"{begin}text{end}"


ENDS_ONLY = Marks()
