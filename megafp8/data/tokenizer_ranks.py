"""tiktoken's files of ranks: a line `base64 rank` for each piece.

How a text is cut before merging and which control ids there are is not in such a file. Of those that the package
tiktoken knows it is looked up by the file's sha256; of others a JSON file beside it says so (`NAME.json` for `NAME`):

    {"pattern": "cl100k_base", "special_tokens": {"<|endoftext|>": 100257}, "eos_token": "<|endoftext|>"}

`pattern` is a regular expression or the name of an encoding of the package that has the same; `bos_token` may be there.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megafp8.core.errors import DataError, one_line

_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")
_ENDS = ("<|endoftext|>", "<|end_of_text|>")
_BEGINS = ("<|begin_of_text|>", "<|startoftext|>")


def is_tiktoken(data: bytes) -> bool:
    """Whether a file's first line is one of ranks; the name tells nothing (Llama 3's is called tokenizer.model)."""
    return bool(_LINE.match(data[:4096]))


def side_file(path: Path) -> Path:
    """What says how to use a file of ranks."""
    return path.with_name(f"{path.name}.json")


class TiktokenTokenizer:
    """A file of ranks, encoded by the package tiktoken; a control string inside a text is text.

    Attributes:
        path: the file.
        pattern: of the pieces that merges do not cross.
        scheme: name of the package's encoding that has this pattern, "" if none.
        ranks, special_tokens: {piece: id}.
    """

    kind = "tiktoken"

    def __init__(self, path: Path) -> None:
        try:
            import tiktoken  # optional: only such files need it
            import tiktoken_ext.openai_public as known
        except ImportError:
            raise DataError(f"{path}: needs the package tiktoken; run `pip install tiktoken`") from None
        data = path.read_bytes()
        self.path, self.ranks = path, _ranks(path, data)
        encodings = {name: _encoding(make, self.ranks) for name, make in known.ENCODING_CONSTRUCTORS.items()}
        wanted = _from_side_file(path, encodings) or _by_checksum(path, data, encodings)
        self.pattern: str = wanted["pattern"]
        self.special_tokens: dict[str, int] = wanted["special_tokens"]
        self.scheme = next((name for name, one in encodings.items() if one["pat_str"] == self.pattern), "")
        try:
            self._encoding = tiktoken.Encoding(
                path.stem, pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens=self.special_tokens
            )
        except Exception as error:  # a pattern that is none; the package raises what its engine does
            raise DataError(f"{path}: cannot be used ({one_line(error)}); see {side_file(path)}") from None
        ids = [*self.ranks.values(), *self.special_tokens.values()]
        self._ids = frozenset(self.ranks.values())
        if twice := [name for name, number in self.special_tokens.items() if number in self._ids]:
            raise DataError(f"{path}: special token {twice[0]!r} has the id of a piece; correct {side_file(path)}")
        self.vocab_size = max(ids) + 1
        self.eod_id = self.special_tokens.get(wanted["eos_token"], -1)
        self.bos_id = self.special_tokens.get(wanted["bos_token"], -1)
        if self.eod_id < 0:
            raise DataError(f"{path}: no end-of-document token; name one as eos_token in {side_file(path)}")
        how = json.dumps([self.pattern, self.special_tokens], sort_keys=True, ensure_ascii=False)
        self.fingerprint = hashlib.sha256(data + b"\0" + how.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encoding.encode_ordinary(text) for text in texts]  # processes, not threads, share the work

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(i) for i in ids if int(i) in self._ids])


def _ranks(path: Path, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(f"{path}:{number}: not a line of ranks (base64, a space, a number)") from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{path}: has no rank for {len(missing)} of the 256 bytes, first {missing[0]:#04x}; cut short?")
    if len(set(ranks.values())) != len(ranks):
        raise DataError(f"{path}: two pieces have the same rank")
    return ranks


def _encoding(make: Any, ranks: Mapping[bytes, int]) -> dict[str, Any]:
    """What the package says of an encoding, with the sha256 of its file; made without its download."""
    found: dict[str, Any] = {"sha256": ""}

    def loaded(*_: Any, expected_hash: str = "", **__: Any) -> Mapping[bytes, int]:
        found["sha256"] = expected_hash
        return ranks

    names = dict(make.__globals__) | {"load_tiktoken_bpe": loaded, "data_gym_to_mergeable_bpe_ranks": loaded}
    for name, other in make.__globals__.items():  # one encoding may be made from another
        if isinstance(other, types.FunctionType) and other.__module__ == make.__module__:
            names[name] = types.FunctionType(other.__code__, names, name)
    return {**types.FunctionType(make.__code__, names, make.__name__)(), **found}


def _by_checksum(path: Path, data: bytes, encodings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    checksum = hashlib.sha256(data).hexdigest()
    for one in encodings.values():
        if one["sha256"] == checksum:
            return _wanted(one["pat_str"], one["special_tokens"], {})
    raise DataError(
        f"{path}: a tiktoken file that the package does not know; say in {side_file(path)} how it cuts text: "
        '{"pattern": "cl100k_base" or a regular expression, "special_tokens": {"<|endoftext|>": 100257}}'
    )


def _from_side_file(path: Path, encodings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    beside = side_file(path)
    if not beside.is_file():
        return None
    try:
        values = json.loads(beside.read_bytes())
        pattern, special = values["pattern"], {str(k): int(v) for k, v in values["special_tokens"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{beside}: has to be an object with pattern and special_tokens ({error!r})") from None
    return _wanted(encodings[pattern]["pat_str"] if pattern in encodings else pattern, special, values)


def _wanted(pattern: str, special: Mapping[str, int], values: Mapping[str, Any]) -> dict[str, Any]:
    ends = [values["eos_token"]] if "eos_token" in values else [name for name in _ENDS if name in special]
    begins = [values["bos_token"]] if "bos_token" in values else [name for name in _BEGINS if name in special]
    return {
        "pattern": pattern, "special_tokens": dict(special), "eos_token": next(iter(ends), ""),
        "bos_token": next(iter(begins), ""),
    }  # fmt: skip
