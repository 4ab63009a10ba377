"""core/jsonio and core/log: whole files or none, one line an event, no secrets."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megafp8.core import log
from megafp8.core.errors import DataError, ResourceError
from megafp8.core.jsonio import read_json, resource_error, write_atomic, write_json


def test_write_and_read(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"b": [1, 2], "ä": "日本"})
    assert read_json(path) == {"b": [1, 2], "ä": "日本"}
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_full_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_atomic(path, b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megafp8.core.jsonio.os.fsync", full)
    with pytest.raises(ResourceError, match="no space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_numpy_does_not_say_that_the_disk_is_full():
    error = resource_error(OSError("5656 requested and 2552 written"), Path("/x"))
    assert isinstance(error, ResourceError) and "/x: no space left" in str(error)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="file"):
        write_atomic(tmp_path / "file" / "a", b"x")


def test_broken_json_names_the_file(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(DataError, match=r"a\.json: not valid JSON"):
        read_json(tmp_path / "a.json")
    with pytest.raises(DataError, match="no such file"):
        read_json(tmp_path / "b.json")


def test_events_are_one_line_and_hide_secrets(tmp_path, capsys):
    log.set_up(rank=0, file=tmp_path / "log.txt")
    logger = log.get_logger("test")
    log.event(logger, "saved", step=3, loss=1.23456789, hub_token="hf_abc", url="https://me:pw@host/x", text="a b")
    line = (tmp_path / "log.txt").read_text()
    assert line.count("\n") == 1 and 'saved step=3 loss=1.23457 hub_token=*** url=https://***@host/x text="a b"' in line
    log.set_up(rank=1)
    log.event(logger, "silent")
    log.event(logger, "heard", level=logging.WARNING, all_ranks=True)
    err = capsys.readouterr().err
    assert "silent" not in err and "heard rank=1" in err
