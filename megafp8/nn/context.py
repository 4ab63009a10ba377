"""What all layers of one forward pass share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megafp8.nn.cache import KeyValueCache
from megafp8.nn.dropout import DropoutKey

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Context:
    """Tables, masks and the dropout key of one micro-batch; S is the whole sequence.

    Attributes:
        cos, sin: [S/cp, 1 or B, d/2], the rows of this rank's tokens, or None without rotary positions.
        segment_ids: [B, S], which document a token belongs to; None: all the same.
        places: [S/cp] int64, where this rank's tokens stand in the sequence; None: it has all of them (cp = 1).
        dropout: None: nothing is dropped.
        cache: keys and values of earlier tokens, which attention sees too; None: there are none.
        num_sequences: of the global batch, over which auxiliary losses of experts are averaged; 0: there are none.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    segment_ids: Tensor | None = None
    dropout: DropoutKey | None = None
    num_sequences: int = 0
    places: Tensor | None = None
    cache: KeyValueCache | None = None

    def with_cache(self, cache: KeyValueCache, positions: Tensor | None) -> Context:
        """The context of a call whose tokens, at `positions` [B, S] int64, are added to `cache`."""
        assert positions is not None and self.places is None, "a cache wants positions, and whole sequences"
        cache.begin(positions)
        return replace(self, cache=cache)
