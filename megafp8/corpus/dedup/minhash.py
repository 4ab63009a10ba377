"""Near duplicates: MinHash signatures in bands over the whole corpus (locality-sensitive hashing).

Two documents are duplicates if all values of one band agree, which for shingle sets of Jaccard similarity s happens
with probability 1 - (1 - s^rows)^bands (Broder 1997; Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, 3.4);
`bands = 14`, `rows = 8` are FineWeb's (arXiv:2406.17557): 0.5 at s = 0.69, 0.92 at 0.8, 0.06 at 0.5. Duplicates of
duplicates are duplicates. A document without letters or digits has no near duplicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import rensa
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.core.errors import ConfigError
from megafp8.corpus.dedup.records import BAND
from megafp8.corpus.dedup.shingles import mix, shingles

_ALGORITHM = 2  # of rensa's values; others would not be comparable with signatures on disk
_MAX_VALUES = 4096


@config_dataclass
class MinHash:
    """How alike documents have to be."""

    words: Annotated[int, Field(ge=1, le=64, description="words that make a shingle")] = 5
    characters: Annotated[
        int, Field(ge=1, le=64, description="characters that make a shingle in scripts written without spaces")
    ] = 5
    bands: Annotated[int, Field(ge=1, description="bands of a signature; one that agrees is enough")] = 14
    rows: Annotated[int, Field(ge=1, description="values in a band, which all have to agree")] = 8
    seed: Annotated[int, Field(ge=0, lt=1 << 32, description="of the hash functions")] = 1

    version = 1
    reason = "near duplicate"
    unit = "document"
    dtype = BAND

    def __post_init__(self) -> None:
        if self.bands * self.rows > _MAX_VALUES:
            raise ValueError(f"bands {self.bands} x rows {self.rows}: at most {_MAX_VALUES} values in a signature")
        if rensa.RMinHash.ALGORITHM_VERSION != _ALGORITHM:
            raise ConfigError(
                f"rensa computes version {rensa.RMinHash.ALGORITHM_VERSION} of its values, this code expects "
                f"{_ALGORITHM}; install the rensa of requirements.lock"
            )

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "minhash"

    def chance(self, similarity: float) -> float:
        """Probability that two documents of this Jaccard similarity are found (the S-curve)."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)

    def signature_matrix(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """MinHash values.

        Returns:
            values: uint32 [documents with shingles, bands * rows].
            which: int64 [documents with shingles], their numbers among `texts`.
        """
        hashes, bounds = shingles(texts, self.words, self.characters)
        which = np.flatnonzero(np.diff(bounds))
        offsets = np.append(bounds[which], bounds[-1]).astype(np.uint64)  # the others are empty
        if not len(which):
            return np.empty((0, self.bands * self.rows), np.uint32), which
        rows = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
            hashes, offsets, num_perm=self.bands * self.rows, seed=self.seed
        ).to_rows()
        return np.array(rows, np.uint32), which

    def records(self, texts: Sequence[str], first: int) -> tuple[np.ndarray, int]:
        """A record for each band of each document, and the number behind the last document.

        At 10^10 documents about 500 pairs of the 10^22 share one of the 64-bit keys by chance.
        """
        values, which = self.signature_matrix(texts)
        values = values.reshape(len(which), self.bands, self.rows).astype(np.uint64)
        keys = np.tile(mix(np.arange(1, self.bands + 1, dtype=np.uint64)), (len(which), 1))
        for row in range(self.rows):
            keys = mix(keys ^ values[:, :, row])
        found = np.empty(keys.size, BAND)
        found["key"] = keys.ravel()
        found["document"] = np.repeat(which.astype(np.uint64) + np.uint64(first), self.bands)
        return found, first + len(texts)


STEP = MinHash
