"""The writer behind every converter: interrupted runs go on, memory is a budget, the disk's refusals are one line."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from megafp8.convert import folder as folders
from megafp8.convert import stream
from megafp8.convert.folder import Beside
from megafp8.convert.source import open_source
from megafp8.convert.stream import Group, Made, Output, write_groups
from megafp8.convert.tensor_files import read_header
from megafp8.core.errors import CheckpointError, ResourceError
from tests.unit.infer.models import config_of, save_model

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("run"), config_of(num_layers=3, num_kv_heads=2))


def plan(source, *, make=Made, files=2):
    names = list(source.shapes)
    return [
        Group(n, (n,), (Output(f"{at % files}.safetensors", n, BF16, source.shapes[n]),), make, BF16, memory=0)
        for at, n in enumerate(names)
    ]


def same(folder, source, files=2):
    tensors = {n: t for f in range(files) for n, t in load_file(folder / f"{f}.safetensors").items()}
    assert tensors.keys() == source.shapes.keys()
    return all(torch.equal(tensors[n], source.read(n).to(BF16)) for n in tensors)


def test_what_is_read_and_rounded_in_chunks_is_rounded_once(checkpoint_folder, monkeypatch):
    monkeypatch.setattr("megafp8.checkpoint.piece_file._CHUNK_BYTES", 52)  # 13 elements: no row, no power of two
    with open_source(checkpoint_folder) as source:
        assert all(torch.equal(source.read(n, BF16), source.read(n).to(BF16)) for n in source.shapes)


def test_an_interrupted_run_goes_on(tmp_path, checkpoint_folder):
    made, lines = [], []

    def counted(tensors):
        made.append(1)
        if len(made) == 9:
            raise KeyboardInterrupt
        return Made(tensors, {"largest": float(tensors[0].abs().max())})

    with open_source(checkpoint_folder) as source:
        with pytest.raises(KeyboardInterrupt), Beside(tmp_path / "out") as folder:
            write_groups(folder, source, plan(source, make=counted), workers=1)
        assert not (tmp_path / "out").exists() and len(made) == 9
        journal = folder / folders.JOURNAL
        noted = [json.loads(line) for line in journal.read_text().splitlines()][1:]
        assert len(noted) == 8
        journal.write_text(journal.read_text()[:-7])  # a kill in the middle of a line
        place = read_header(folder / "0.safetensors")[noted[2]["group"]]
        with open(folder / "0.safetensors", "rb+") as file:  # and bytes that never reached the disk
            file.seek(place.start + place.bytes - 3)
            file.write(b"\0\0\0")
        with Beside(tmp_path / "out") as folder:
            written = write_groups(folder, source, plan(source, make=counted), workers=1, say=lines.append)
        assert len(made) == 9 + len(source.shapes) - 7 + 1
        assert same(tmp_path / "out", source)
        assert written.notes.keys() == source.shapes.keys()  # those of the first run too
        assert any("goes on after an interrupted run: 7 of" in line for line in lines)
        assert "from before" in lines[-1]
        assert sorted(os.listdir(tmp_path / "out")) == ["0.safetensors", "1.safetensors"]


@pytest.mark.parametrize("change", ["options", "source"])
def test_another_plan_starts_afresh(tmp_path, checkpoint_folder, change):
    def stop(tensors):
        raise KeyboardInterrupt

    with open_source(checkpoint_folder) as source:
        groups = plan(source)
        with pytest.raises(KeyboardInterrupt), Beside(tmp_path / "out") as folder:
            write_groups(folder, source, [*groups[:-1], plan(source, make=stop)[-1]], workers=1)
        if change == "source":
            source.fingerprint = "another"
        lines = []
        with Beside(tmp_path / "out") as folder:
            options = {"percentile": 99} if change == "options" else {}
            write_groups(folder, source, groups, options=options, say=lines.append)
        assert same(tmp_path / "out", source) and not any("goes on" in line for line in lines)


def _convert_until_killed(source_path, out, started):
    def slow(tensors):
        started.set()
        time.sleep(0.05)
        return Made(tensors)

    with open_source(source_path) as source, Beside(out) as folder:
        write_groups(folder, source, plan(source, make=slow), workers=2)


def test_a_killed_process_leaves_what_the_next_one_takes_up(tmp_path, checkpoint_folder):
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=_convert_until_killed, args=(checkpoint_folder, tmp_path / "out", started))
    process.start()
    assert started.wait(30)
    with open_source(checkpoint_folder) as source:
        with pytest.raises(ResourceError, match="another conversion is writing it"), Beside(tmp_path / "out"):
            pass
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert not (tmp_path / "out").exists()
        lines = []
        with Beside(tmp_path / "out") as folder:
            write_groups(folder, source, plan(source), say=lines.append)
        assert same(tmp_path / "out", source) and "goes on" in lines[0]


def test_an_error_leaves_nothing(tmp_path, checkpoint_folder):
    def fail(tensors):
        raise CheckpointError("no")

    with open_source(checkpoint_folder) as source:
        with pytest.raises(CheckpointError), Beside(tmp_path / "new" / "deep" / "out") as folder:
            write_groups(folder, source, plan(source, make=fail))
        assert not list(tmp_path.iterdir())


def test_groups_hold_no_more_than_the_budget(checkpoint_folder, tmp_path):
    held, most, lock = 0, 0, threading.Lock()

    with open_source(checkpoint_folder) as source:

        def watched(tensors):
            nonlocal held, most
            size = sum(tensor.nbytes for tensor in tensors)
            with lock:
                held += size
                most = max(most, held)
            time.sleep(0.002)
            with lock:
                held -= size
            return Made(tensors)

        write_groups(tmp_path, source, plan(source, make=watched), workers=8)
        largest = max(source.read(n, BF16).nbytes for n in source.shapes)
        assert largest < most <= 2 * largest


def test_no_space_is_told_before_anything_is_written(tmp_path, checkpoint_folder, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(stream.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with open_source(checkpoint_folder) as source:
        with pytest.raises(ResourceError, match="needs .* bytes, 10 are free"), Beside(tmp_path / "out") as folder:
            write_groups(folder, source, plan(source))
        assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_is_one_line(tmp_path, checkpoint_folder, monkeypatch):
    def full(fd, data, start):
        raise OSError(28, "No space left on device")

    with open_source(checkpoint_folder) as source:
        groups = plan(source)
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(ResourceError, match="no space left"), Beside(tmp_path / "out") as folder:
            write_groups(folder, source, groups)
        assert not list(tmp_path.iterdir())
