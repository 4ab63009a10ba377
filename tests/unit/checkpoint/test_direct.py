"""A file written past the page cache holds the same bytes as any other, also where there is no such way to write."""

import errno
import mmap
import os
import stat

import pytest

from megafp8.checkpoint import direct
from megafp8.checkpoint.direct import DirectFile
from megafp8.checkpoint.manifest import checksum

PAGE = mmap.PAGESIZE


def write(path, parts):
    told, whole, sums = [], checksum(), []
    with DirectFile(path, told.append) as file:
        for part in parts:
            sums.append(checksum())
            file.append(part, (whole, sums[-1]))
        file.finish()
    assert file.bytes == path.stat().st_size
    assert sum(told) >= file.bytes and whole.hexdigest() == checksum(b"".join(parts)).hexdigest()
    assert [own.hexdigest() for own in sums] == [checksum(part).hexdigest() for part in parts]
    return path.read_bytes()


@pytest.mark.parametrize("sizes", [[], [0, 1], [PAGE], [3, 2 * PAGE], [2 * PAGE - 7, 7], [5, 9 * PAGE + 1, 0, 13]])
def test_bytes_and_checksums_of_any_sizes(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(direct, "_CHUNK", 2 * PAGE)
    parts = [os.urandom(size) for size in sizes]
    assert write(tmp_path / "file", parts) == b"".join(parts)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) & ~0o640 == 0


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no direct writes on this system")
@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_without_direct_writes_gets_ordinary_ones(tmp_path, monkeypatch, refused):
    real, tries = getattr(os, refused), []

    def call(where, what, *mode):
        flags = what if refused == "open" else direct.fcntl.fcntl(where, direct.fcntl.F_GETFL)
        tries.append(bool(flags & os.O_DIRECT))
        if tries[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(where, what, *mode)

    parts = [os.urandom(PAGE + 1), b"end"]
    with monkeypatch.context() as patch:
        patch.setattr(direct.os, refused, call)
        with DirectFile(tmp_path / "file") as file:
            for part in parts:
                file.append(part, ())
            file.finish()
    assert tries == [True, False] and (tmp_path / "file").read_bytes() == b"".join(parts)


def test_what_the_system_refuses_is_raised(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == b"old"
