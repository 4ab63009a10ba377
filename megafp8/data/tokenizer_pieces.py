"""What each id of a tokenizer stands for: whole characters, bytes of one, nothing it knows, or a control string."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megafp8.core.errors import DataError
from megafp8.data.tokenizer import CONTROL, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megafp8.data.tokenizer_ranks import TiktokenTokenizer

TEXT, BYTE, UNKNOWN, NO_TEXT = range(4)


class Pieces(NamedTuple):
    """Of each id of a tokenizer.

    Attributes:
        kinds: uint8 [V]: TEXT; BYTE, a byte or some that are no whole characters; UNKNOWN; NO_TEXT, control or unused.
        split: int32 [V]: characters that begin in this piece and have no piece of their own: of a fallback byte the
            character whose first byte it is, of bytes that end within a character that one.
    """

    kinds: np.ndarray
    split: np.ndarray


@lru_cache(maxsize=2)  # a worker asks for each of its tasks, and a vocabulary takes a tenth of a second
def pieces_of(tokenizer: Tokenizer) -> Pieces:
    """The pieces of any kind of tokenizer."""
    kinds = np.full(tokenizer.vocab_size, NO_TEXT, np.uint8)
    split = np.zeros(tokenizer.vocab_size, np.int32)
    for number, kind, data in _pieces(tokenizer):
        if kind == TEXT and not _is_whole(data):
            kind = BYTE
        kinds[number] = kind
        if kind != TEXT:  # whole characters are not split
            split[number] = _split_characters(data) if kind == BYTE else kind == UNKNOWN
    return Pieces(kinds, split)


def byte_letters() -> dict[str, int]:
    """{letter: byte}: how byte-level vocabularies write bytes (GPT-2's table): itself where it can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


def _pieces(tokenizer: Tokenizer) -> list[tuple[int, int, bytes]]:
    """(id, kind, bytes) of each id that has something to say; fallback bytes of SentencePiece are BYTE."""
    tokenizer = getattr(tokenizer, "reference", tokenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _of_sentencepiece(tokenizer)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _of_definition(json.loads(tokenizer.definition))
    if isinstance(tokenizer, TiktokenTokenizer):
        return [(number, TEXT, piece) for piece, number in tokenizer.ranks.items()]
    if tokenizer.kind == "bytes":
        return [(len(CONTROL) + byte, TEXT, bytes([byte])) for byte in range(256)]
    raise DataError(f"no report is made of tokenizers of the kind {tokenizer.kind!r}")


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> list[tuple[int, int, bytes]]:
    model, found = tokenizer.model, []
    for number in range(model.get_piece_size()):
        piece = model.id_to_piece(number)
        if model.is_unknown(number):
            found.append((number, UNKNOWN, b""))
        elif model.is_byte(number):
            found.append((number, BYTE, bytes([int(piece[3:5], 16)])))
        elif not (model.is_control(number) or model.is_unused(number)):
            found.append((number, TEXT, piece.encode("utf-8")))
    return found


def _of_definition(definition: dict[str, Any]) -> list[tuple[int, int, bytes]]:
    """Of a tokenizer.json: byte-level, or with fallback bytes (`<0x0A>`), or characters only."""
    model = definition["model"]
    vocabulary: dict[str, int] | list[Any] = model["vocab"]
    if isinstance(vocabulary, list):  # unigram: [piece, score]
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    letters = _letter_table() if _is_byte_level(definition) else {}
    special = {one["id"] for one in definition.get("added_tokens", []) if one["special"]}
    unknown = model.get("unk_token")
    found = []
    for piece, number in vocabulary.items():
        if piece == unknown or number == model.get("unk_id"):
            found.append((number, UNKNOWN, b""))
        elif number in special:
            continue
        elif letters:
            found.append((number, TEXT, _letters_to_bytes(piece, letters)))
        elif model.get("byte_fallback") and len(piece) == 6 and piece.startswith("<0x"):
            found.append((number, BYTE, bytes([int(piece[3:5], 16)])))
        else:
            found.append((number, TEXT, piece.encode("utf-8")))
    found += [
        (one["id"], TEXT, one["content"].encode())
        for one in definition.get("added_tokens", [])
        if not one["special"] and one["content"] not in vocabulary
    ]
    return found


def _letter_table() -> dict[int, str]:
    """For `str.translate`: letters of `byte_letters` to the character of their byte, others below 256 to one above."""
    letters = byte_letters()
    return dict.fromkeys(range(256), "�") | {ord(letter): chr(byte) for letter, byte in letters.items()}


def _letters_to_bytes(piece: str, table: dict[int, str]) -> bytes:
    """The bytes that a piece spells, or its own where it is not spelled in letters for bytes."""
    try:
        return piece.translate(table).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def _is_byte_level(definition: dict[str, Any]) -> bool:
    parts = json.dumps([definition.get("pre_tokenizer"), definition.get("decoder")])
    return '"ByteLevel"' in parts


def _is_whole(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _split_characters(data: bytes) -> int:
    """Characters that begin in `data` and are not whole in it; a lone fallback byte is never a piece of its own."""
    if len(data) == 1:
        return int(not 0x80 <= data[0] < 0xC0)
    begins = sum(not 0x80 <= byte < 0xC0 for byte in data)
    return begins - len(data.decode("utf-8", errors="ignore"))
