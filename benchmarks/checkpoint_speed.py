"""Saving and loading a state against torch.save, safetensors and torch.distributed.checkpoint (DCP), on this disk.

Contenders take turns, so that what else the machine and the disk do hits all alike; figures are medians over the
rounds, ratios medians of the ratios of a round. A save counts until its bytes are on the disk (fsync, which torch.save
and safetensors do not do themselves), a load from the page cache, which is what checksums cost, and from the disk.
Asynchronous saves run beside steps of matrix products on one thread a core: what the step is slowed to, and how long it
stood still for the snapshot.

    python -m benchmarks.checkpoint_speed --megabytes 1000 --rounds 3 --folder /some/disk
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from megafp8 import checkpoint
from megafp8.checkpoint.asynchronous import AsyncSaver
from megafp8.checkpoint.staging import Staging
from megafp8.core.layout import Layout
from megafp8.parallel.mesh import Mesh

State = dict[str, torch.Tensor]
HIDDEN = 2048  # tensors as of a model of this width: matrices of 16 and 45 MB, norms of 8 KB


def make_state(megabytes: int) -> State:
    """fp32 tensors of a decoder's shapes, about so large together."""
    shapes = {"qkv": (3072, HIDDEN), "proj": (HIDDEN, HIDDEN), "up": (5632, HIDDEN), "norm": (HIDDEN,)}
    state: State = {}
    layer, left = 0, megabytes * 1e6
    while left > 0:
        for name, shape in shapes.items():
            state[f"optimizer.master.layers.{layer}.{name}.weight"] = tensor = torch.randn(shape)
            left -= tensor.nbytes
        layer += 1
    return state


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _remember(folder: Path) -> None:
    """Bring a folder's files into the page cache, past which some are written."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                while file.read(1 << 24):
                    pass


@dataclass(frozen=True)
class Peer:
    """A way to save a state into an empty folder, durably, and to load it into tensors that exist."""

    save: Callable[[State, Path], None]
    load: Callable[[State, Path], None]


def _ours(threads: int) -> Peer:
    mesh = Mesh.single()

    def load(state: State, folder: Path) -> None:
        checkpoint.load(folder / "step_00000001", state, {}, mesh)

    return Peer(lambda state, folder: _nothing(checkpoint.save(folder, 1, state, {}, mesh, {}, threads=threads)), load)


def _nothing(_: object) -> None:
    return None


def _dcp(threads: int) -> Peer:
    def save(state: State, folder: Path) -> None:
        dcp.save(state, storage_writer=FileSystemWriter(folder, thread_count=threads), no_dist=True)
        _sync(folder)  # its own fsync leaves out the folder and, for small files, the last buffer

    return Peer(save, lambda state, folder: dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True))


def _torch_save(state: State, folder: Path) -> None:
    torch.save(state, folder / "state.pt")
    _sync(folder)


def _torch_load(state: State, folder: Path) -> None:
    for name, tensor in torch.load(folder / "state.pt", weights_only=True).items():
        state[name].copy_(tensor)


def _safetensors_save(state: State, folder: Path) -> None:
    save_file(state, folder / "state.safetensors")
    _sync(folder)


def _safetensors_load(state: State, folder: Path) -> None:
    for name, tensor in load_file(folder / "state.safetensors").items():
        state[name].copy_(tensor)


PEERS = {
    "megafp8, 2 threads, checksums": _ours(2),
    "DCP FileSystemWriter, 1 thread": _dcp(1),
    "DCP FileSystemWriter, 2 threads": _dcp(2),
    "torch.save / torch.load": Peer(_torch_save, _torch_load),
    "safetensors": Peer(_safetensors_save, _safetensors_load),
}
OURS = next(iter(PEERS))


def turns(state: State, root: Path, rounds: int) -> None:
    """Print the rates of saves and loads."""
    size = sum(tensor.nbytes for tensor in state.values()) / 1e6
    seconds: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": [], "cold": []} for name in PEERS}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for number in range(rounds):
        order = list(PEERS.items())
        for name, peer in order[number % len(order) :] + order[: number % len(order)]:
            folder = root / "state"
            folder.mkdir()
            seconds[name]["save"].append(_timed(lambda p=peer, f=folder: p.save(state, f)))
            _remember(folder)
            seconds[name]["load"].append(_timed(lambda p=peer, f=folder: p.load(target, f)))
            _forget(folder)
            seconds[name]["cold"].append(_timed(lambda p=peer, f=folder: p.load(target, f)))
            assert all(torch.equal(target[key], state[key]) for key in state), f"{name} loads something else"
            for tensor in target.values():
                tensor.zero_()
            shutil.rmtree(folder)
    print(f"{size:.0f} MB in {len(state)} tensors, medians of {rounds} rounds; x: megafp8's rate over theirs")
    print(f"{'':34}{'save MB/s':>10}{'x':>6}{'load MB/s':>11}{'x':>6}{'from disk MB/s':>16}{'x':>6}")
    for name, found in seconds.items():
        line = f"{name:34}"
        for kind, width in (("save", 10), ("load", 11), ("cold", 16)):
            ratio = statistics.median(t / o for t, o in zip(found[kind], seconds[OURS][kind], strict=True))
            line += f"{size / statistics.median(found[kind]):>{width}.0f}{ratio:>6.2f}"
        print(line)


def _timed(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def steps(work: Callable[[], Any], until: Callable[[], bool], least: int) -> list[float]:
    """Seconds of each step of `work` until `until`, at least `least`."""
    found: list[float] = []
    while not until() or len(found) < least:
        found.append(_timed(work))
    return found


def asynchronous(state: State, root: Path, rounds: int) -> None:
    """Print what saves in the background cost the steps beside them."""
    a = torch.randn(1024, 1024)

    def work() -> None:
        for _ in range(4):
            a @ a

    steps(work, lambda: True, 20)
    print(
        f"\nsaves in the background of {torch.get_num_threads()} threads that compute; x: step beside a save / without"
    )
    print(f"{'':34}{'stand still s':>14}{'step x':>8}{'save s':>8}{'lost s':>8}")
    for name, begin in _backgrounds(root):
        stalls, ratios, whole, lost = [], [], [], []
        for _ in range(rounds + 1):  # the first one makes buffers and processes, and does not count
            plain = statistics.median(steps(work, lambda: True, 20))
            start = time.perf_counter()
            done = begin(state)
            stalls.append(time.perf_counter() - start)
            beside = steps(work, done, 1)
            whole.append(time.perf_counter() - start)
            ratios.append(statistics.median(beside) / plain)
            lost.append(whole[-1] - len(beside) * plain)
            _empty(root)
        found = [statistics.median(values[1:]) for values in (stalls, ratios, whole, lost)]
        print(f"{name:34}{found[0]:>14.3f}{found[1]:>8.2f}{found[2]:>8.2f}{found[3]:>8.2f}")


def _empty(root: Path) -> None:
    for path in root.iterdir():
        shutil.rmtree(path)


def _backgrounds(root: Path) -> Iterator[tuple[str, Callable[[State], Callable[[], bool]]]]:
    """Ways to begin a save; what they return says whether it is done."""
    staging = Staging(600.0)
    saver = AsyncSaver(root, Mesh.single(), checkpoint.CheckpointConfig(), staging)

    def ours(state: State) -> Callable[[], bool]:
        saver.begin(1, state, {}, {})
        return lambda: saver.poll() is not None

    yield "megafp8", ours
    staging.close()
    for name, kind in (("DCP async_save, thread", AsyncCheckpointerType.THREAD),):

        def theirs(state: State, kind: AsyncCheckpointerType = kind) -> Callable[[], bool]:
            writer = FileSystemWriter(root / "dcp", thread_count=2)
            future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind, no_dist=True)
            return future.done  # type: ignore[union-attr]

        yield name, theirs


class _Place:
    """One rank of a mesh that exists on paper, to load what that rank would."""

    rank, world = 0, 1

    def __init__(self, axis: str, coord: int, size: int) -> None:
        self._axis, self._coord, self._size = axis, coord, size

    def size(self, axis: str) -> int:
        return self._size if axis == self._axis else 1

    def coord(self, axis: str) -> int:
        return self._coord if axis == self._axis else 0

    def place(self, axes: tuple[str, ...]) -> tuple[int, int]:
        return (self._coord, self._size) if self._axis in axes else (0, 1)


def resharding(state: State, root: Path) -> None:
    """Print the bytes that ranks of another mesh read, against those of their boxes."""
    dims = {"qkv": 0, "proj": 1, "up": 0}  # as tensor parallelism cuts them
    layouts = {
        name: Layout(tuple(tensor.shape), {dims[kind]: "tp"} if (kind := name.split(".")[-2]) in dims else {})
        for name, tensor in state.items()
    }
    path = checkpoint.save(root, 1, state, layouts, Mesh.single(), {})
    manifest = (path / "manifest.json").stat().st_size
    print("\nbytes that a rank of another mesh reads from what one process saved, beside the manifest")
    for size in (1, 2, 4, 8):
        place = _Place("tp", size - 1, size)
        mine = {name: tensor[layouts[name].local_slices(place)] for name, tensor in state.items()}
        target = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
        before = _read_so_far()
        checkpoint.load(path, target, layouts, place)
        read = _read_so_far() - before - manifest
        assert all(torch.equal(target[name], mine[name]) for name in mine)
        needed = sum(tensor.nbytes for tensor in mine.values())
        print(f"tp 1 -> tp {size}: needed {needed / 1e6:8.1f} MB, read {read / 1e6:8.1f} MB, {read / needed:.3f} x")
    shutil.rmtree(path)


def _read_so_far() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError("/proc/self/io has no rchar")


def main(words: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_speed", description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default="", help="on the disk to be measured; default: the temporary folder")
    args = parser.parse_args(words)
    warnings.filterwarnings("ignore", module="torch.distributed")
    state = make_state(args.megabytes)
    with tempfile.TemporaryDirectory(prefix="megafp8-speed-", dir=args.folder or None) as name:
        root = Path(name)
        turns(state, root, args.rounds)
        asynchronous(state, root, args.rounds)
        resharding(state, root)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
