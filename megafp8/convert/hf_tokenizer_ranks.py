"""tiktoken's ranks as a tokenizers.Tokenizer with the same ids."""

from __future__ import annotations

import re
from typing import Any

from megafp8.convert.optional import load
from megafp8.core.errors import ConfigError
from megafp8.data.tokenizer_ranks import TiktokenTokenizer


def ranks_tokenizer(tokenizer: TiktokenTokenizer) -> Any:
    """A byte-level BPE whose merges are the ways in which ranked pieces are made of ranked pieces.

    tiktoken merges the neighbours whose union has the lowest rank, so merges go by the rank of what they make; a piece
    that is ranked as a whole is taken as it is (`ignore_merges`).

    Raises:
        ConfigError: a pattern that the `tokenizers` package cannot read.
    """
    tokenizers = load("tokenizers")
    letters = byte_letters()
    names = {piece: "".join(letters[byte] for byte in piece) for piece in tokenizer.ranks}
    vocabulary = {names[piece]: rank for piece, rank in tokenizer.ranks.items()}
    merges = []
    for piece, rank in tokenizer.ranks.items():
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [pair for pair in cuts if pair[0] in names and pair[1] in names]
        merges += [(rank, tokenizer.ranks[a], tokenizer.ranks[b], names[a], names[b]) for a, b in pairs]
    merges.sort()
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [(left, right) for *_, left, right in merges], ignore_merges=True)
    )
    pre = tokenizers.pre_tokenizers
    try:
        split = pre.Split(tokenizers.Regex(_for_oniguruma(tokenizer.pattern)), "isolated")
    except Exception as error:  # the package raises bare Exception
        raise ConfigError(
            f"{tokenizer.path}: its pattern cannot be written into a tokenizer.json: {error}; --tokenizer can name a "
            "tokenizer.json with the same ids"
        ) from error
    made.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    special = sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    at = len(vocabulary)
    for name, number in special:
        if number != at:
            raise ConfigError(
                f"{tokenizer.path}: special token {name!r} has id {number} where {at} is next; a tokenizer.json has no "
                "gaps: name an unused special token for each id between in the file beside it"
            )
        at += 1
    made.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name, _ in special])
    return made


def _for_oniguruma(pattern: str) -> str:
    """A pattern of tiktoken's engine for that of `tokenizers`.

    There `{1,3}+` is a repeated repetition, not a possessive one, and `$` ends any line, not the text.
    """
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    return re.sub(r"(?<!\\)\$", r"\\z", pattern)


def byte_letters() -> list[str]:
    """The letter by which byte-level tokenizers write each byte (GPT-2's table): itself where it can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    table = {byte: chr(byte) for byte in seen} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]
