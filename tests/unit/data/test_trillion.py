"""A corpus of 10^12 tokens opens and serves its first batch in under a second and under 200 MB."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SERVE = """
import resource, sys, time
import numpy
start = time.perf_counter()
from megafp8.data import IndexedDataset
from megafp8.data.blend import Blend
from megafp8.data.samples import SampleStream
dataset = IndexedDataset(sys.argv[1])
stream = SampleStream(dataset, 4096, seed=1)
blend = Blend([stream, stream], [0.3, 0.7], 1)
rows = numpy.stack([blend.sample(i) for i in range(8)])
last = stream.sample(stream.num_samples - 1)
seconds = time.perf_counter() - start
assert rows.shape == (8, 4097)
if sys.platform == "linux":  # ru_maxrss survives exec there: it would show the test runner's own peak
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(dataset.num_tokens, stream.num_samples, seconds, peak)
"""


@pytest.fixture
def trillion(tmp_path: Path) -> Path:
    """1000 sequences of 10^9 uint16 tokens: a .bin of 2 TB without a block on disk."""
    count, each = 1000, 10**9
    try:
        with open(tmp_path / "t.bin", "wb") as file:
            file.truncate(2 * count * each)
    except OSError as error:
        pytest.fail(f"{tmp_path}: this file system holds no sparse file of 2 TB ({error}); set --basetemp to one")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    lengths = np.full(count, each, "<i4")
    offsets = np.arange(count, dtype="<i8") * 2 * each
    documents = np.arange(count + 1, dtype="<i8")
    (tmp_path / "t.idx").write_bytes(head + lengths.tobytes() + offsets.tobytes() + documents.tobytes())
    return tmp_path / "t"


def test_first_batch_of_a_trillion_tokens(trillion: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(trillion)], check=True, capture_output=True, text=True, timeout=60
    )
    tokens, samples, seconds, peak = done.stdout.split()
    assert int(tokens) == 10**12 and int(samples) == (10**12 - 1) // 4096
    assert float(seconds) < 1.0
    assert int(peak) < 200_000, "kB"
