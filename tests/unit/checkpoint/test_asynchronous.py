"""A save in the background is that of the moment at which it began, and is said to be saved when it is committed."""

import contextlib
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch

from megafp8 import checkpoint
from megafp8.checkpoint import CheckpointConfig, commit, retention
from megafp8.checkpoint.asynchronous import AsyncSaver
from megafp8.checkpoint.background import NICENESS
from megafp8.checkpoint.folders import candidates
from megafp8.checkpoint.staging import Staging
from megafp8.core.errors import CheckpointError, ResourceError
from megafp8.parallel.mesh import Mesh

MESH = Mesh.single()
CONFIG = CheckpointConfig(keep_last=2)


def state(seed=0):
    random = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(300, 70, generator=random),
        "narrow": torch.randn(5, 3, generator=random).bfloat16(),
        "double": torch.randn(3, generator=random, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(3, 8, generator=random).T,
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


@contextlib.contextmanager
def saver(root, *, patience=60.0, config=CONFIG):
    staging = Staging(patience)
    try:
        yield AsyncSaver(root, MESH, config, staging)
    finally:
        staging.close()


def pid_of(made):
    return made.staging._process.pid


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_the_bytes_are_those_of_a_save_that_waits_and_the_process_is_kept(tmp_path):
    with saver(tmp_path / "a") as made:
        assert made.wait() is None and made.poll() is None
        seen = set()
        for step in (1, 2, 3):
            tensors = state(step)
            made.begin(step, tensors, {}, {"step": step})
            for tensor in tensors.values():  # training goes on
                tensor.zero_()
            saved = made.wait()
            assert not made.busy and saved.step == step and saved.path == checkpoint.latest(tmp_path / "a")
            seen.add((pid_of(made), made.staging._memory.data_ptr()))
            path = checkpoint.save(tmp_path / "b", step, state(step), {}, MESH, {"step": step}, threads=2)
            assert [p.name for p in sorted(saved.path.iterdir())] == [p.name for p in sorted(path.iterdir())]
            assert all(p.read_bytes() == (path / p.name).read_bytes() for p in saved.path.iterdir())
            checkpoint.verify(saved.path)
        assert len(seen) == 1  # one process and one buffer for all saves
        assert [p.name for p in candidates(tmp_path / "a")] == ["step_00000003", "step_00000002"]  # keep_last
        larger = state() | {"new": torch.ones(1 << 20)}  # a state that has grown
        made.begin(4, larger, {}, {})
        assert torch.equal(checkpoint.load_tensors(made.wait().path)["new"], larger["new"])


def test_nothing_is_said_or_seen_before_the_commit(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megafp8"), "propagate", True)
    with saver(tmp_path) as made, caplog.at_level(logging.INFO):
        made.begin(1, state(), {}, {})
        made.wait()
        caplog.clear()
        os.kill(pid_of(made), signal.SIGSTOP)
        made.begin(2, state(), {}, {})
        for _ in range(20):
            assert made.poll() is None and made.busy
            time.sleep(0.01)
        assert checkpoint.latest(tmp_path).name == "step_00000001"
        target = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
        path, _ = checkpoint.load_newest(tmp_path, target, {}, MESH)  # a load meanwhile sees what is committed
        assert path.name == "step_00000001" and torch.equal(target["weight"], state()["weight"])
        assert "saved" not in caplog.text and "being written" in caplog.text
        os.kill(pid_of(made), signal.SIGCONT)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(pid_of(made), number)  # to the whole group, from a terminal or a scheduler
        assert made.wait().path == checkpoint.latest(tmp_path)
        assert "checkpoint saved step=2" in caplog.text and "MB_per_second" in caplog.text


FAULTS = {
    "killed": (CheckpointError, "signal 9"),
    "hung": (CheckpointError, "nothing for 0 s"),
    "folder gone": (CheckpointError, "not seen by every rank"),
    "write refused": (ResourceError, "piece_00000_00.safetensors|File too large"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_is_raised_and_the_next_save_is_a_new_attempt(tmp_path, fault):
    with saver(tmp_path) as made:
        made.begin(1, state(), {}, {})
        made.wait()
        os.kill(pid_of(made), signal.SIGSTOP)
        made.begin(2, state(), {}, {})
        if fault == "killed":
            os.kill(pid_of(made), signal.SIGKILL)
        elif fault == "hung":
            made.staging._patience = 0.2
        elif fault == "write refused":  # by the system, in the middle of a file, as by a disk that is full
            resource.prlimit(pid_of(made), resource.RLIMIT_FSIZE, (10_000, 10_000))
            os.kill(pid_of(made), signal.SIGCONT)
        else:
            (temporary,) = (p for p in tmp_path.iterdir() if p.name.startswith(".step_00000002"))
            temporary.rmdir()
            os.kill(pid_of(made), signal.SIGCONT)
        kind, message = FAULTS[fault]
        with pytest.raises(kind, match=f"step 2 was not saved: rank 0: .*({message})"):
            made.wait()
        assert not made.busy and [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
        made.staging._patience = 60.0
        made.begin(3, state(), {}, {})
        checkpoint.verify(made.wait().path)


@pytest.mark.skipif(not os.path.exists("/proc/self/autogroup"), reason="sessions are not scheduled as groups here")
def test_the_process_that_writes_leaves_the_processors_to_training(tmp_path):
    """It has a session of its own, so that niceness alone would count among its own threads only."""
    with saver(tmp_path) as made:
        made.begin(1, state(), {}, {})
        made.wait()
        pid = pid_of(made)
        assert os.getpriority(os.PRIO_PROCESS, pid) == NICENESS
        with open(f"/proc/{pid}/autogroup") as file:
            assert file.read().split()[1:] == ["nice", str(NICENESS)]


def test_what_cannot_be_saved_is_told_at_once(tmp_path, monkeypatch):
    with saver(tmp_path / "file" / "below") as made:
        (tmp_path / "file").write_text("")
        with pytest.raises(ResourceError, match="file"):
            made.begin(1, state(), {}, {})
        assert not made.busy
    free = commit.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(commit.shutil, "disk_usage", lambda path: free)
    with saver(tmp_path / "full") as made, pytest.raises(ResourceError, match=r"needs \d+ bytes, 1000 are free"):
        made.begin(1, state(), {}, {})


def test_what_cannot_be_deleted_does_not_make_a_save_fail(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megafp8"), "propagate", True)

    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(), {}, MESH, {})
    monkeypatch.setattr(retention, "remove", refuse)
    assert retention.prune_or_warn(tmp_path, replace(CONFIG, keep_last=1)) == []
    assert "were not pruned" in caplog.text


def trainer(root: str, when: str, pipe) -> None:
    """Save once, be killed while the writer waits, writes or is stopped."""
    made = AsyncSaver(root, MESH, CONFIG, Staging(60.0))
    tensors = {"weight": torch.ones(1 << 23)}
    made.begin(1, tensors, {}, {})
    made.wait()
    if when == "writes":
        made.begin(2, tensors, {}, {})
        time.sleep(0.02)
    if when == "is stopped":
        os.kill(pid_of(made), signal.SIGSTOP)
    pipe.send(pid_of(made))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
@pytest.mark.parametrize("when", ["waits", "writes", "is stopped"])
def test_the_process_never_outlives_its_trainer(tmp_path, when):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megafp8.checkpoint.asynchronous", "megafp8.parallel.mesh"])
    ours, theirs = context.Pipe()
    process = context.Process(target=trainer, args=(str(tmp_path), when, theirs))
    process.start()
    pid = ours.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    end = time.monotonic() + 5
    while is_alive(pid):
        assert time.monotonic() < end, "it goes on though nobody waits for it"
        time.sleep(0.01)
    checkpoint.verify(checkpoint.latest(tmp_path))
    with saver(tmp_path) as made:
        made.begin(3, state(), {}, {})
        made.wait()
    assert all(p.name.startswith("step_") for p in tmp_path.iterdir())
