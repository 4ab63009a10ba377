"""megatron-core's IndexedDataset reads what we write, and we read what its builder writes, byte for byte.

megatron-core is a dependency of the tests only (extra `dev`). Where it does not import, these tests fail with its
reason: a contract that nobody checks is no contract.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megafp8.data import IndexedDataset, IndexedDatasetWriter
from megafp8.data.merge import merge
from megafp8.data.split import Amount, split

DOCUMENTS = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13, 14], [60000]]
CUTS = [[6], [4, 2], [2], [1]]


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about each optional package that it does not find
            return importlib.import_module("megatron.core.datasets.indexed_dataset")
    except Exception as error:
        pytest.fail(
            f"megatron-core does not import ({type(error).__name__}: {error}); install it with "
            "`pip install --no-deps megatron-core==0.16.1` (it needs torch, numpy, packaging; newer ones import triton)"
        )


def build_theirs(theirs: ModuleType, prefix: Path, dtype: type, *, modes: list[int] | None = None) -> None:
    builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=modes is not None)
    for number, (document, cuts) in enumerate(zip(DOCUMENTS, CUTS, strict=True)):
        extra = {"modes": [modes[number]] * len(cuts)} if modes is not None else {}
        builder.add_document(np.asarray(document, dtype), cuts, **extra)
    builder.finalize(f"{prefix}.idx")


def build_ours(prefix: Path, dtype: type) -> None:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document, cuts in zip(DOCUMENTS, CUTS, strict=True):
            writer.add_document(document, cuts)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_bytes_are_equal(theirs: ModuleType, tmp_path: Path, dtype: type) -> None:
    build_theirs(theirs, tmp_path / "theirs", dtype)
    build_ours(tmp_path / "ours", dtype)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


@pytest.mark.parametrize("mmap", [True, False])
def test_they_read_ours(theirs: ModuleType, tmp_path: Path, mmap: bool) -> None:
    build_ours(tmp_path / "ours", np.uint16)
    dataset = theirs.IndexedDataset(str(tmp_path / "ours"), mmap=mmap)
    flat = [row.tolist() for row in (dataset[i] for i in range(len(dataset)))]
    assert flat == [DOCUMENTS[0], DOCUMENTS[1][:4], DOCUMENTS[1][4:], DOCUMENTS[2], DOCUMENTS[3]]
    assert dataset.document_indices.tolist() == [0, 1, 3, 4, 5]
    assert dataset.sequence_lengths.tolist() == [6, 4, 2, 2, 1]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16, np.float32, np.float64])
def test_we_read_theirs(theirs: ModuleType, tmp_path: Path, dtype: type) -> None:
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "t.bin"), dtype=dtype)
    builder.add_document(np.asarray([1, 2, 3], dtype), [3])
    builder.add_document(np.asarray([4, 5], dtype), [1, 1])
    builder.finalize(str(tmp_path / "t.idx"))
    dataset = IndexedDataset(tmp_path / "t")
    assert dataset.dtype == dtype and dataset.side == {}
    assert [dataset.document(i).tolist() for i in range(2)] == [[1, 2, 3], [4, 5]]


def test_we_read_their_multimodal_sets(theirs: ModuleType, tmp_path: Path) -> None:
    build_theirs(theirs, tmp_path / "m", np.int32, modes=[0, 1, 0, 1])
    dataset = IndexedDataset(tmp_path / "m", multimodal=True)
    assert dataset.sequence_modes is not None and dataset.sequence_modes.tolist() == [0, 1, 1, 0, 1]
    assert dataset.document(3).tolist() == [60000]


def test_optimal_dtype_is_theirs(theirs: ModuleType) -> None:
    from megafp8.data.indexed import optimal_dtype

    for size in (8192, 32000, 65499, 65500, 65535, 65536, 128256):
        assert optimal_dtype(size) == np.dtype(theirs.DType.optimal_dtype(size)), size


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_merged_bytes_are_equal(theirs: ModuleType, tmp_path: Path, dtype: type) -> None:
    """What their builder appends (`add_index`) and what we merge; then they read what we split off."""
    for name in ("a", "b"):
        build_theirs(theirs, tmp_path / name, dtype)
    builder = theirs.IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=dtype)
    for name in ("a", "b"):
        builder.add_index(f"{tmp_path}/{name}")
    builder.finalize(f"{tmp_path}/theirs.idx")
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "ours")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    wanted = {str(tmp_path / "half"): Amount("docs", 4), str(tmp_path / "x"): Amount("rest")}
    parts, _ = split(tmp_path / "theirs", wanted)
    found = theirs.IndexedDataset(str(tmp_path / "half"))
    ours = parts[str(tmp_path / "half")]
    assert [found[i].tolist() for i in range(len(found))] == [ours[i].tolist() for i in range(len(ours))]
    assert found.document_indices.tolist() == ours.document_index.tolist() and ours.num_documents == 4
