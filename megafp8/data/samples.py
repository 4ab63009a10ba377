"""Sample i of a token stream: arithmetic, nothing to build, nothing to cache.

The stream of T tokens is cut at multiples of S; sample j is tokens [jS, jS + S + 1), neighbours share one token (the
last target of one is the first input of the next). An epoch visits the n = (T - 1) // S samples in an order that is
a keyed permutation of [0, n), computed for the one i that is asked: a Feistel network over the next power of four,
walked until it lands below n (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). So a run can
be lengthened, resumed at any i, or spread over any number of ranks, and no sample moves.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np

from megafp8.core.errors import DataError

_ROUNDS = 8  # Luby-Rackoff needs 4 for a pseudo-random permutation; 8 since the round function is a mixer, no cipher
_MASK64 = (1 << 64) - 1


class TokenStream(Protocol):
    """What samples ask of a dataset: `IndexedDataset` is one."""

    dtype: np.dtype
    num_tokens: int

    def tokens(self, start: int, stop: int) -> np.ndarray: ...


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): 64 bits to 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """The Feistel keys of one epoch, 64 bits each."""
    digest = hashlib.sha512(f"megafp8 samples {seed} {epoch}".encode()).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))


def feistel_half(size: int) -> int:
    """Bits of each half of the network for a domain of `size`."""
    return max((size - 1).bit_length() + 1 >> 1, 3)  # 64 values at least: fewer leave the rounds too little to mix


def permuted(index: int, size: int, keys: tuple[int, ...]) -> int:
    """Where `index` goes under the keyed permutation of [0, size)."""
    assert 0 <= index < size, (index, size)
    half = feistel_half(size)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        index = left << half | right
        if index < size:  # the domain is at most 4 * size (or 64), so a few steps do
            return index


class SampleStream:
    """Samples of one dataset in a seeded order.

    Args:
        dataset: an IndexedDataset (ids, not floats).
        sequence_length: S, tokens that a sample trains on.
        seed: of the order.

    Attributes:
        num_samples: n, samples in an epoch.

    Raises:
        DataError: fewer than S + 1 tokens; a dataset of floats.
    """

    def __init__(self, dataset: TokenStream, sequence_length: int, seed: int) -> None:
        assert sequence_length > 0, sequence_length
        self.dataset, self.sequence_length, self.seed = dataset, sequence_length, seed
        self.num_samples = max(dataset.num_tokens - 1, 0) // sequence_length
        name = getattr(dataset, "path_prefix", "dataset")
        if self.num_samples == 0:
            raise DataError(
                f"{name}: {dataset.num_tokens} tokens, but sequence_length {sequence_length} needs "
                f"{sequence_length + 1} for one sample; give more text or a sequence_length of at most "
                f"{max(dataset.num_tokens - 1, 0)}"
            )
        if dataset.dtype.kind not in "iu":
            raise DataError(f"{name}: holds {dataset.dtype}, not token ids; tokenize it again")
        self._epoch, self._keys = 0, round_keys(seed, 0)

    def position(self, index: int) -> int:
        """Where sample `index` (any >= 0; epoch index // n) lies: the j of tokens [jS, jS + S + 1)."""
        epoch, rest = divmod(index, self.num_samples)
        if epoch != self._epoch:
            self._epoch, self._keys = epoch, round_keys(self.seed, epoch)
        return permuted(rest, self.num_samples, self._keys)

    def sample(self, index: int) -> np.ndarray:
        """Token ids of sample `index`, int64 [S + 1]: inputs are [:-1], targets [1:]."""
        start = self.position(index) * self.sequence_length
        return self.dataset.tokens(start, start + self.sequence_length + 1).astype(np.int64)
