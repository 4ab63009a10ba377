"""What attention has seen: keys and values of earlier tokens, so that a new token costs one position and not all.

A slot of the cache is a position of the text. Rows of a batch may have different lengths: what padding wrote behind a
row's end is never looked at, for a query sees slots up to its own position, and each slot is written before it is.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


class KeyValueCache:
    """Keys [B, g, slots, d] and values [B, g, slots, e] of each attention layer of a model, in the model's dtype.

    Memory of a layer is taken when it first writes.

    Args:
        batch: rows of every call.
        slots: positions that there is room for.
    """

    def __init__(self, batch: int, slots: int) -> None:
        self.batch, self.slots = batch, slots
        self.filled = 0  # slots that hold something in some row
        self.positions = torch.zeros(batch, 0, dtype=torch.int64)
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}
        self._first = True

    def begin(self, positions: Tensor) -> None:
        """The next call brings tokens at `positions` [B, S] int64; positions of a row follow each other."""
        assert positions.shape[0] == self.batch, "as many rows as the cache was made for"
        highest = int(positions.max()) + 1
        assert highest <= self.slots, f"position {highest - 1} is beyond the cache's {self.slots} slots"
        self._first = self.filled == 0
        self.positions, self.filled = positions, max(self.filled, highest)

    @property
    def is_first(self) -> bool:
        """Whether this call's tokens see nothing but each other."""
        return self._first

    def extend(self, name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k [B, g, S, d] and v [B, g, S, e] of attention layer `name`; returns all so far, [B, g, filled, d or e].

        What is returned is the cache itself, not a copy.
        """
        if name not in self._kept:
            self._kept[name] = tuple(x.new_zeros(*x.shape[:2], self.slots, x.shape[3]) for x in (k, v))  # type: ignore[assignment]
        whole = self._kept[name]
        rows = torch.arange(self.batch, device=k.device)[:, None]
        for kept, new in zip(whole, (k, v), strict=True):
            if self._first:
                kept[:, :, : new.shape[2]] = new
            else:
                kept[rows, :, self.positions] = new.transpose(1, 2)
        return whole[0][:, :, : self.filled], whole[1][:, :, : self.filled]

    def hidden(self) -> Tensor:
        """Which slots the tokens of this call must not see, bool [B, S, filled]."""
        return torch.arange(self.filled, device=self.positions.device) > self.positions[:, :, None]

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with these rows alone, `rows` [n] int64: ended texts cost nothing more."""
        self.batch = len(rows)
        self._kept = {name: (k[rows], v[rows]) for name, (k, v) in self._kept.items()}

    @property
    def num_bytes(self) -> int:
        """Of all layers, on this rank."""
        return sum(x.nbytes for pair in self._kept.values() for x in pair)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """A few queries against all keys: the product that decoding is bound by reads each key once for its r heads.

    Args:
        q: [B, g, S, r, d], scaled; k: [B, g, K, d]; v: [B, g, K, e]; hidden: [B, S, K], where it must not look.

    Returns:
        [S, B, g * r * e].
    """
    batch, groups, length, r = q.shape[:4]
    scores = q.flatten(2, 3) @ k.transpose(2, 3)  # [B, g, S * r, K]
    mask = hidden.repeat_interleave(r, 1)[:, None]
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores.masked_fill_(mask, float("-inf")), -1, dtype=wide).to(v.dtype)
    out = (weights @ v).view(batch, groups, length, r, -1)
    return out.permute(2, 0, 1, 3, 4).flatten(2)
