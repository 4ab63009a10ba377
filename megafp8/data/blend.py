"""Which corpus serves sample i: a pure function of (weights, seed, i), with nothing built beforehand.

Streams are the leaves of a balanced binary tree. At a node whose left half has the share p of the weight, the first
i samples hold floor(p * i + phase) of the left, in exact rational arithmetic; a sample that raises this count goes
left, and its number there is the count before it. So each stream sees 0, 1, 2, ... without gaps (exactly once an
epoch), and after any number i of samples a stream's share is off by less than one sample for each level of the tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from megafp8.core.errors import ConfigError


class Samples(Protocol):
    """What a blend and a loader ask of their source."""

    sequence_length: int

    def sample(self, index: int) -> np.ndarray: ...


def check_weights(weights: Sequence[float]) -> None:
    """Raise ConfigError unless all are positive and finite."""
    for weight in weights:
        if not 0 < weight < float("inf"):
            raise ConfigError(f"weight {weight} is not positive and finite; leave the dataset out instead")


class Blend:
    """Several sample streams as one endless stream.

    Args:
        streams: SampleStreams of equal sequence_length.
        weights: positive; only their ratios count.
        seed: shifts the phase in which streams take turns.

    Raises:
        ConfigError: no stream, a weight that is not positive and finite, or not one weight for each stream.
    """

    def __init__(self, streams: Sequence[Samples], weights: Sequence[float], seed: int) -> None:
        if not streams or len(streams) != len(weights):
            raise ConfigError(f"{len(streams)} datasets and {len(weights)} weights; give one weight for each dataset")
        check_weights(weights)
        lengths = {stream.sequence_length for stream in streams}
        assert len(lengths) == 1, lengths
        self.streams, self.seed, self.sequence_length = list(streams), seed, lengths.pop()
        self._ends = [Fraction(0)]
        for weight in weights:
            self._ends.append(self._ends[-1] + Fraction(weight))
        self._nodes: dict[tuple[int, int], tuple[int, int, int]] = {}

    def _node(self, first: int, after: int) -> tuple[int, int, int]:
        """(numerator, denominator, phase) of streams [first, after): floor((num * i + phase) / den) go left."""
        if (first, after) not in self._nodes:
            middle = (first + after) // 2
            share = (self._ends[middle] - self._ends[first]) / (self._ends[after] - self._ends[first])
            digest = hashlib.sha256(f"megafp8 blend {self.seed} {first} {after}".encode()).digest()
            phase = int.from_bytes(digest[:8], "little") * share.denominator >> 64  # < den, so nothing at i = 0
            self._nodes[first, after] = (share.numerator, share.denominator, phase)
        return self._nodes[first, after]

    def locate(self, index: int) -> tuple[int, int]:
        """(stream, number of the sample in that stream) of sample `index`, any >= 0."""
        assert index >= 0, index
        first, after = 0, len(self.streams)
        while after - first > 1:
            num, den, phase = self._node(first, after)
            before, now = (num * index + phase) // den, (num * (index + 1) + phase) // den
            middle = (first + after) // 2
            if now > before:
                after, index = middle, before
            else:
                first, index = middle, index - before
        return first, index

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples each stream serves; they add up exactly."""
        found = [0] * len(self.streams)
        todo = [(0, len(self.streams), num_samples)]
        while todo:
            first, after, count = todo.pop()
            if after - first == 1:
                found[first] = count
                continue
            num, den, phase = self._node(first, after)
            middle, left = (first + after) // 2, (num * count + phase) // den
            todo += [(first, middle, left), (middle, after, count - left)]
        return found

    def sample(self, index: int) -> np.ndarray:
        """Token ids of sample `index`, int64 [S + 1]."""
        stream, local = self.locate(index)
        return self.streams[stream].sample(local)
