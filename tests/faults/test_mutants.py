"""Each check can fail: with a protection taken out, the fault that it is there for is seen."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8 import checkpoint
from megafp8.checkpoint import commit, direct, latest, load_tensors, piece_file, storage_writer
from megafp8.checkpoint.folders import step_name
from megafp8.core import jsonio
from megafp8.core.errors import CheckpointError
from megafp8.optim import clip
from megafp8.parallel.mesh import Mesh
from megafp8.train import saving, stopping
from megafp8.train import step as step_module
from tests.distributed import test_nonfinite
from tests.distributed.ranks import run_ranks
from tests.faults.attempts import attempt, forks
from tests.faults.conftest import WORDS
from tests.faults.injuries import flip_bit
from tests.faults.test_disks import intact, save_until, values

SEED = 44


def _in_place(root: Path, step: int, needed: int) -> Path:
    folder = root / step_name(step)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _prune_first(root: Path, step: int, needed: int) -> Path:
    for folder in root.glob("step_*"):
        shutil.rmtree(folder)
    return commit.begin_folder(root, step, needed)


MUTANTS: dict[str, Callable[[Path, int, int], Path]] = {"no rename": _in_place, "old one first": _prune_first}


def _mutant_save(root: str, limit: int, name: str) -> None:
    if name:
        storage_writer.begin_folder = MUTANTS[name]
    save_until(root, limit, 1, True)


@forks
@pytest.mark.parametrize("name", ["", *MUTANTS])
def test_a_write_that_is_cut_is_seen_without_the_rename_and_with_retention_first(tmp_path, name):
    checkpoint.save(tmp_path, 1, values(1), {}, Mesh.single(), {"step": 1})
    process = multiprocessing.get_context("forkserver").Process(target=_mutant_save, args=(str(tmp_path), 9_000, name))
    process.start()
    process.join(60)
    assert process.exitcode not in (0, 1)
    assert intact(tmp_path) == [1] if not name else latest(tmp_path) is None


def test_flips_are_silent_without_the_checksums(tmp_path, monkeypatch):
    rng, silent = random.Random(SEED), {False: 0, True: 0}
    path = checkpoint.save(tmp_path, 1, values(1), {}, Mesh.single(), {"step": 1})
    for mutant in silent:
        if mutant:
            monkeypatch.setattr(piece_file, "checksum", lambda data=b"": _Agrees())
        for _ in range(20):
            shutil.copytree(path, copy := tmp_path / "copy" / path.name)
            flip_bit(copy / "piece_00000_00.safetensors", rng)
            with contextlib.suppress(CheckpointError):
                silent[mutant] += any(bool((tensor != 1).any()) for tensor in load_tensors(copy).values())
            shutil.rmtree(copy)
    assert silent[False] == 0 and silent[True] > 10, silent


class _Agrees:
    """A checksum that is every checksum."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> Any:
        return _Same()


class _Same(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def test_a_file_that_is_not_synced_before_the_commit_is_seen(tmp_path, monkeypatch):
    def synced(drop: bool) -> bool:
        """Whether every piece was synced before its folder got its name."""
        done: list[int] = []
        real, rename = os.fsync, os.rename

        def fsync(fd: int) -> None:
            done.append(os.fstat(fd).st_ino)
            real(fd)

        missing = []

        def renamed(source: Any, target: Any) -> None:
            if Path(source).name.endswith(".tmp") and Path(source).is_dir():
                missing.extend(f for f in Path(source).iterdir() if f.stat().st_ino not in done)
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(jsonio.os, "fsync", fsync)
            patch.setattr(commit.os, "rename", renamed)
            if drop:
                patch.setattr(direct.os, "fsync", lambda fd: None)
            checkpoint.save(tmp_path / str(drop), 1, values(1), {}, Mesh.single(), {"step": 1})
        return not missing

    assert synced(False) and not synced(True)


def _alone(rank: int, world: int, mutant: bool) -> list[Any]:
    if mutant:  # each rank looks at the norm of what it holds
        clip.all_reduce_ = lambda tensor, *rest, **how: tensor
        step_module._origin = lambda *arguments: None  # one rank alone would look for it for ever
    mesh, name, value = test_nonfinite.CASES["tp"]
    return [row[0] for row in test_nonfinite.broken(rank, world, mesh, 1, name, value)]


def test_ranks_decide_apart_without_the_sum_of_their_norms():
    assert run_ranks(_alone, 2, False) == [[True, False, True]] * 2
    first, second = run_ranks(_alone, 2, True)
    assert first != second


def _own_stop(rank: int) -> None:
    stopping.all_reduce_ = lambda tensor, *rest, **how: tensor


def _said_too_early(rank: int) -> None:
    real = saving.save_run

    def save_run(parts: Any, step: int, progress: dict[str, Any]) -> Path:
        parts.loader.consumed_samples += parts.loader.global_batch
        try:
            return real(parts, step, progress)
        finally:
            parts.loader.consumed_samples -= parts.loader.global_batch

    saving.save_run = save_run


@forks
def test_a_stop_that_ranks_do_not_agree_on_is_seen(config):
    words = [*WORDS, "--train.timeout_seconds", "3"]
    ended = attempt(config, 2, words, orders="forward:term:1:3", within=_own_stop)
    assert ended.codes != [75, 75] and 75 not in ended.codes[:1]


@forks
def test_data_that_are_ahead_of_the_weights_are_seen(config, as_calm):
    ended = attempt(config, 2, WORDS, orders="forward:kill:0:7", within=_said_too_early)
    assert ended.codes[0] == -9
    assert attempt(config, 2, WORDS).codes == [0, 0]
    assert not as_calm()


def _own_loss(rank: int) -> None:
    step_module.all_reduce_ = lambda tensor, *rest, **how: tensor


@forks
def test_a_loss_that_ranks_do_not_share_is_seen(config):
    """F26 without its sum: one rank skips the step, the other takes it."""
    ended = attempt(config, 2, [*WORDS, "--guard.replica_interval", "5"], orders="loss:nan:1:7", within=_own_loss)
    assert ended.codes != [0, 0], ended.said
