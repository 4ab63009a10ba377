"""Order of samples: a permutation, by seed and epoch, that nothing about the run's size can change."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from megafp8.core.errors import ConfigError, DataError
from megafp8.data.blend import Blend
from megafp8.data.samples import SampleStream, permuted, round_keys

GOLDEN = [4, 5, 15, 6, 14, 2, 13, 1, 9, 8, 12, 10, 0, 3, 11, 7]


class Counting:
    """A stream whose token t is t."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.dtype = num_tokens, np.dtype("i8")

    def tokens(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.num_tokens
        return np.arange(start, stop)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 255, 256, 257, 1000, 4097])
def test_permutation_is_exact(size: int) -> None:
    for epoch in (0, 1):
        keys = round_keys(7, epoch)
        assert sorted(permuted(i, size, keys) for i in range(size)) == list(range(size))


def test_permutation_looks_random() -> None:
    """Fixed points of a random permutation are Poisson(1): P(more than 8) = 1.1e-6. The rank correlation of 4096
    places has standard deviation 1/sqrt(4095) = 0.0156; 5 of them = 0.078."""
    n = 4096
    for epoch in range(5):
        keys = round_keys(1, epoch)
        order = np.asarray([permuted(i, n, keys) for i in range(n)])
        assert (order == np.arange(n)).sum() <= 8
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.078
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.078


def test_small_permutations_take_every_first_place() -> None:
    """Over 600 epochs of 6 samples each value leads 100 times on average; sd sqrt(600*5/36) = 9.1, 5 sd = 46."""
    counts = Counter(permuted(0, 6, round_keys(3, epoch)) for epoch in range(600))
    assert len(counts) == 6 and all(abs(count - 100) < 46 for count in counts.values())


def test_permutation_of_1e12_is_instant_and_in_range() -> None:
    keys = round_keys(5, 0)
    found = {permuted(i, 10**12, keys) for i in range(1000)}
    assert len(found) == 1000 and max(found) < 10**12


def test_each_epoch_serves_each_sample_once() -> None:
    stream = SampleStream(Counting(1001), 10, seed=3)
    n = stream.num_samples
    assert n == 100
    epochs = [[stream.position(e * n + i) for i in range(n)] for e in range(3)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_every_target_of_the_stream_once_an_epoch() -> None:
    """Samples overlap by one token, so that each token but the first is a target exactly once."""
    stream = SampleStream(Counting(101), 10, seed=3)
    targets = np.concatenate([stream.sample(i)[1:] for i in range(stream.num_samples)])
    assert sorted(targets.tolist()) == list(range(1, 101))


def test_sample_is_int64_of_length_s_plus_1() -> None:
    sample = SampleStream(Counting(50), 8, seed=0).sample(17)
    assert sample.dtype == np.int64 and sample.shape == (9,) and (np.diff(sample) == 1).all()


@pytest.mark.parametrize(("tokens", "length", "samples"), [(9, 8, 1), (16, 8, 1), (17, 8, 2)])
def test_number_of_samples(tokens: int, length: int, samples: int) -> None:
    assert SampleStream(Counting(tokens), length, 0).num_samples == samples


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_too_short_a_stream_is_refused(tokens: int) -> None:
    with pytest.raises(DataError, match=f"{tokens} tokens, but sequence_length 8 needs 9"):
        SampleStream(Counting(tokens), 8, 0)


def test_floats_are_refused() -> None:
    stream = Counting(100)
    stream.dtype = np.dtype("f4")
    with pytest.raises(DataError, match="float32, not token ids"):
        SampleStream(stream, 8, 0)


def test_order_is_stable_across_versions() -> None:
    """A golden order: changing it would reshuffle the data of every run that resumes."""
    assert [SampleStream(Counting(161), 10, seed=1234).position(i) for i in range(16)] == GOLDEN


def blend(weights: list[float], seed: int = 0) -> Blend:
    streams = [SampleStream(Counting(10 * (k + 3) + 1), 10, seed=k) for k in range(len(weights))]
    return Blend(streams, weights, seed)


@pytest.mark.parametrize("weights", [[1.0], [1, 1], [0.001, 0.999], [3, 2, 1], [0.1, 0.2, 0.3, 0.4], [1e-9, 1, 5]])
def test_blend_is_exact_at_every_prefix(weights: list[float]) -> None:
    """Off by less than one sample per level of the tree, at most ceil(log2 4) = 2 here; streams have no gaps."""
    mix, total = blend(weights), sum(weights)
    counts = [0] * len(weights)
    for i in range(5000):
        stream, local = mix.locate(i)
        assert local == counts[stream]
        counts[stream] += 1
        assert all(abs(c - w / total * (i + 1)) < 2 + 1e-9 for c, w in zip(counts, weights, strict=True))


def test_blend_of_40000_streams() -> None:
    """More than an int16 can number."""
    stream = SampleStream(Counting(11), 10, 0)
    mix = Blend([stream] * 40000, [1.0] * 40000, 0)
    assert len({mix.locate(i)[0] for i in range(40000)}) == 40000


def test_blend_at_1e15_is_direct() -> None:
    assert blend([0.3, 0.7]).locate(10**15)[1] > 10**14


def test_blend_depends_on_ratios_only() -> None:
    assert [blend([1, 3]).locate(i) for i in range(50)] == [blend([0.25, 0.75]).locate(i) for i in range(50)]


def test_blend_phase_depends_on_seed() -> None:
    assert len({tuple(blend([1, 2, 4], seed).locate(i)[0] for i in range(20)) for seed in range(10)}) > 3


@pytest.mark.parametrize("weights", [[0.0, 1.0], [-1.0, 1.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="not positive and finite"):
        blend(weights)


def test_weights_and_streams_must_pair() -> None:
    with pytest.raises(ConfigError, match="2 weights"):
        Blend([SampleStream(Counting(11), 10, 0)], [1, 2], 0)


def test_no_torch_before_the_loader() -> None:
    code = "import sys, megafp8.data, megafp8.data.sources, megafp8.data.verify, megafp8.data.config\n" + (
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
