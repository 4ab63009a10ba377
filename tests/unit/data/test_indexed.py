"""The .bin/.idx format: golden bytes, and each trap that files of this format are known for."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megafp8.core.errors import DataError, ResourceError
from megafp8.core.jsonio import read_json
from megafp8.data import IndexedDataset, IndexedDatasetWriter
from megafp8.data import indexed_writer as writer_module
from megafp8.data.indexed import optimal_dtype


def write(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> IndexedDataset:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def test_golden_bytes(tmp_path: Path) -> None:
    """Three documents [6], [4, 2], [2] as uint16: the 114 bytes that Megatron's own builder writes."""
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([1, 2, 3, 4, 5, 6])
        writer.add_document([7, 8, 9, 10, 11, 12], [4, 2])
        writer.add_document([13, 14])
    expected = (
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 4)
        + struct.pack("<4i", 6, 4, 2, 2) + struct.pack("<4q", 0, 12, 20, 24) + struct.pack("<4q", 0, 1, 3, 4)
    )  # fmt: skip
    assert len(expected) == 114
    assert (tmp_path / "d.idx").read_bytes() == expected
    assert (tmp_path / "d.bin").read_bytes() == np.arange(1, 15, dtype="<u2").tobytes()
    dataset = IndexedDataset(tmp_path / "d")
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (4, 3, 14)
    assert dataset[1].tolist() == [7, 8, 9, 10] and dataset[-1].tolist() == [13, 14]
    assert dataset.document(1).tolist() == [7, 8, 9, 10, 11, 12]
    assert dataset.tokens(5, 8).tolist() == [6, 7, 8]


def test_nothing_but_three_files(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1]])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx", "d.json"]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_integer_dtype(tmp_path: Path, dtype: str) -> None:
    top = min(np.iinfo(dtype).max, 2**40)
    dataset = write(tmp_path / "d", [[0, top], [top]], dtype)
    assert dataset.dtype == dtype and dataset[0].tolist() == [0, top] and dataset[1].tolist() == [top]


def test_floats_are_read_by_their_own_codes(tmp_path: Path) -> None:
    """Code 6 is double and 7 is single precision; by size one would guess the reverse."""
    for code, dtype in ((6, "<f8"), (7, "<f4")):
        values = np.asarray([1.5, 2.5], dtype)
        (tmp_path / "f.bin").write_bytes(values.tobytes())
        head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 1, 2)
        (tmp_path / "f.idx").write_bytes(head + struct.pack("<iqqq", 2, 0, 0, 1))
        assert IndexedDataset(tmp_path / "f")[0].tolist() == [1.5, 2.5]


@pytest.mark.parametrize("ids", [[70000], np.asarray([70000]), [-1], [2**70], [1.5], [[1, 2]], [True]])
def test_ids_never_wrap(tmp_path: Path, ids: object) -> None:
    with pytest.raises(DataError), IndexedDatasetWriter(tmp_path / "d", "uint16") as writer:
        writer.add_document(ids)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_id_message_names_value_rule_and_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"70000 does not fit uint16 \(0 to 65535\).*int32"):
        write(tmp_path / "d", [[70000]])


def test_lengths_must_add_up(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="add up to 7, but 3"), IndexedDatasetWriter(tmp_path / "d", "u2") as writer:
        writer.add_document([1, 2, 3], [7])
    with pytest.raises(DataError), IndexedDatasetWriter(tmp_path / "d", "u2") as writer:
        writer.add_document([1, 2, 3], [4, -1])


def test_sequence_of_2_to_31_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_SEQUENCE_TOKENS", 3)
    with pytest.raises(DataError, match="4 tokens; the format holds 3"):
        write(tmp_path / "d", [[1, 2, 3, 4]])


@pytest.mark.parametrize("suffix", ["bin", "idx"])
@pytest.mark.parametrize("change", ["cut", "longer", "empty", "gone"])
def test_damaged_files_do_not_open(tmp_path: Path, suffix: str, change: str) -> None:
    write(tmp_path / "d", [[1, 2, 3], [4, 5]])
    (tmp_path / "d.json").unlink()  # it would give the damage away: the two files have to do so by themselves
    path = tmp_path / f"d.{suffix}"
    data = path.read_bytes()
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": data[:-2], "longer": data + b"\0\0", "empty": b""}[change])
    with pytest.raises(DataError, match=f"d.{suffix}"):
        IndexedDataset(tmp_path / "d")


def test_every_byte_of_the_index_counts(tmp_path: Path) -> None:
    """Any one flipped byte is refused at opening, or found when the sequence is read or the set is verified."""
    from megafp8.data.verify import problems

    write(tmp_path / "d", [[1, 2, 3], [4, 5], [6]])
    path = tmp_path / "d.idx"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        try:
            dataset = IndexedDataset(tmp_path / "d")
            found = problems(dataset)
        except DataError:
            continue
        assert found, f"byte {at}"


def test_bad_offset_is_refused_on_reading(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2], [3, 4], [5, 6]])
    path = tmp_path / "d.idx"
    data = bytearray(path.read_bytes())
    for offset in (-8, 3, 2**40):
        data[34 + 12 + 8 : 34 + 12 + 16] = struct.pack("<q", offset)
        path.write_bytes(bytes(data))
        with pytest.raises(DataError, match="sequence 1"):
            IndexedDataset(tmp_path / "d")[1]


def test_wrong_magic_version_and_code(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1]])
    path = tmp_path / "d.idx"
    data = path.read_bytes()
    for at, value, words in (
        (0, b"TNTIDX\0\0\0", "not a Megatron index"),
        (9, b"\2", "version 2"),
        (17, b"\x63", "99"),
    ):
        path.write_bytes(data[:at] + value + data[at + len(value) :])
        with pytest.raises(DataError, match=words):
            IndexedDataset(tmp_path / "d")


def test_a_header_that_claims_too_much_is_refused_before_mapping(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1]])
    path = tmp_path / "d.idx"
    data = bytearray(path.read_bytes())
    data[18:26] = struct.pack("<Q", 2**62)
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match="cut or damaged"):
        IndexedDataset(tmp_path / "d")


def test_multimodal_has_to_be_told(tmp_path: Path) -> None:
    """The index of a multimodal set is N bytes longer and nothing else says so."""
    write(tmp_path / "d", [[1, 2], [3]])
    (tmp_path / "d.json").unlink()
    path = tmp_path / "d.idx"
    path.write_bytes(path.read_bytes() + b"\0\1")
    with pytest.raises(DataError, match="it fits multimodal=True"):
        IndexedDataset(tmp_path / "d")
    modes = IndexedDataset(tmp_path / "d", multimodal=True).sequence_modes
    assert modes is not None and modes.tolist() == [0, 1]
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="it fits multimodal=False"):
        IndexedDataset(tmp_path / "d", multimodal=True)


def test_empty_set_and_empty_documents(tmp_path: Path) -> None:
    assert len(write(tmp_path / "none", [])) == 0
    dataset = write(tmp_path / "some", [[], [1], []])
    assert [dataset[i].tolist() for i in range(3)] == [[], [1], []]
    assert write(tmp_path / "only", [[], []]).num_tokens == 0


def test_prefix_with_suffix_is_explained(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1]])
    with pytest.raises(DataError, match=r"give the prefix without \.bin or \.idx"):
        IndexedDataset(tmp_path / "d.bin")


def test_error_leaves_the_old_set(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2]])
    with pytest.raises(RuntimeError), IndexedDatasetWriter(tmp_path / "d", "u2") as writer:
        writer.add_document([3])
        raise RuntimeError
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx", "d.json"]


@pytest.mark.parametrize("failing", ["os.fsync", "os.replace", "checksum_file"])
def test_disk_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(ResourceError, match="no space"):
        writer = IndexedDatasetWriter(tmp_path / "d", "u2")
        with monkeypatch.context() as patch, writer:
            patch.setattr(f"megafp8.data.indexed_writer.{failing}", full)
            writer.add_document([1])
            if failing == "os.fsync":
                writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_snapshot_continues_to_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "whole", [[1, 2], [3], [4, 5, 6]])
    first = IndexedDatasetWriter(tmp_path / "d", "u2")
    first.add_document([1, 2])
    first.add_document([3])
    state = first.snapshot()
    first.add_document([99] * 100)  # lost with the process
    first.abort()
    with IndexedDatasetWriter(tmp_path / "d", "u2", state=state) as second:
        second.add_document([4, 5, 6])
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"d.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()


def test_many_documents_at_once_equal_one_by_one(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [], [4], [5, 6]]
    write(tmp_path / "one", documents)
    with IndexedDatasetWriter(tmp_path / "all", "u2") as writer:
        writer.add_documents(np.concatenate([np.asarray(d, int) for d in documents]), [len(d) for d in documents])
    assert (tmp_path / "one.idx").read_bytes() == (tmp_path / "all.idx").read_bytes()


def test_join_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "one", [[1], [2, 3], [4], [5, 6, 7], [8]])
    monkeypatch.setattr(writer_module, "_CHUNK", 2)
    write(tmp_path / "two", [[1], [2, 3], [4], [5, 6, 7], [8]])
    assert (tmp_path / "one.idx").read_bytes() == (tmp_path / "two.idx").read_bytes()


def test_side_file_has_counts_checksums_and_metadata(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "d", "u2", metadata={"tokenizer": {"kind": "bytes"}}) as writer:
        writer.add_document([1, 2])
        writer.metadata["languages"] = {"en": 1}
    side = read_json(tmp_path / "d.json")
    assert side["num_tokens"] == 2 and side["dtype"] == "uint16" and side["languages"] == {"en": 1}
    assert side["tokenizer"] == {"kind": "bytes"} and set(side["checksums"]) == {"bin", "idx"}


def test_side_file_of_another_set_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2]])
    write(tmp_path / "e", [[1, 2, 3]])
    (tmp_path / "e.json").replace(tmp_path / "d.json")
    with pytest.raises(DataError, match="says 3 tokens"):
        IndexedDataset(tmp_path / "d")


def test_bounds(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [[1, 2], [3]])
    for bad in (2, -3):
        with pytest.raises(IndexError):
            dataset[bad]
    for start, stop in ((-1, 1), (2, 1), (0, 4)):
        with pytest.raises(IndexError):
            dataset.tokens(start, stop)


def test_dtype_by_vocabulary_is_megatrons() -> None:
    assert optimal_dtype(65499) == np.uint16 and optimal_dtype(65500) == np.int32


def test_release_lets_go_and_reads_again(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "d", "u2") as writer:
        writer.add_document(np.full(1 << 22, 7))
    dataset = IndexedDataset(tmp_path / "d")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    total, before = int(dataset[0].sum(dtype=np.int64)), resident()
    dataset.release()
    assert resident() < before - 4 * 2**20 and int(dataset[0].sum(dtype=np.int64)) == total == 7 << 22


@pytest.mark.parametrize("vocab_size", [65499, 65500, 65535, 65536, 65537, 128256])
def test_largest_id_of_a_vocabulary_is_kept(tmp_path: Path, vocab_size: int) -> None:
    """The dtype goes by the vocabulary; what does not fit one that is forced is refused, never wrapped."""
    ids = np.array([0, vocab_size - 1], np.int64)
    with IndexedDatasetWriter(tmp_path / "a", optimal_dtype(vocab_size)) as writer:
        writer.add_documents(writer_module.as_ids(ids, optimal_dtype(vocab_size)), np.array([2]))
    assert IndexedDataset(tmp_path / "a").document(0).tolist() == ids.tolist()
    if vocab_size > 65536:
        with pytest.raises(DataError, match="does not fit uint16"):
            writer_module.as_ids(ids, np.dtype("<u2"))
