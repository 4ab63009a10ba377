"""Staging: a trainer's side of the process that writes. Memory shared with it, its jobs, what became of them.

The memory has no name in any file system (nothing is left behind by a kill, and a container's small /dev/shm does not
matter) and is kept from save to save, so that its pages are touched for the first time only once.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint.background import HEADER_BYTES
from megafp8.core.errors import CheckpointError, MegaError, ResourceError

_ALIGN = 64
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class StagedBox:
    """A piece to be staged: its tensor's global name, its name in the file, its place in the tensor, its bytes."""

    tensor: str
    key: str
    dtype: str
    offsets: tuple[int, ...]
    data: torch.Tensor


class Staging:
    """One process that writes, and the memory between it and us. Started with the first job.

    `patience`: seconds without a byte written after which the process counts as hung.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._map: mmap.mmap | None = None
        self._fd = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._moved = (0.0, -1)  # when the count of written bytes was last seen to change, and to what

    def stage(self, files: Mapping[str, Sequence[StagedBox]]) -> list[dict[str, Any]]:
        """Copy tensors, of any device, into the shared memory; returns the files as a job describes them."""
        total, described, copies = HEADER_BYTES, [], []
        for name, boxes in files.items():
            entries = []
            for box in boxes:
                total += -total % _ALIGN
                copies.append((total, box.data))
                entries.append({
                    "tensor": box.tensor, "key": box.key, "dtype": box.dtype, "offsets": box.offsets,
                    "sizes": tuple(box.data.shape), "start": total,
                })  # fmt: skip
                total += box.data.nbytes
            described.append({"name": name, "boxes": entries})
        self._reserve(total)
        on_gpu = False
        for start, data in copies:
            if data.numel():
                target = self._memory[start : start + data.nbytes].view(data.dtype).view(data.shape)
                target.copy_(data.detach(), non_blocking=True)
                on_gpu |= data.is_cuda
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return described

    def _reserve(self, size: int) -> None:
        """Make the memory at least so large."""
        if size <= self._memory.numel():
            return
        self._unpin()
        if self._fd < 0:
            self._fd = os.memfd_create("megafp8-staging") if hasattr(os, "memfd_create") else _unnamed_file()
        os.posix_fallocate(self._fd, 0, size) if hasattr(os, "posix_fallocate") else os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        if torch.cuda.is_available():  # page-locked, so that copies from the GPU go at the bus's full rate
            torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)

    def _unpin(self) -> None:
        if self._memory.numel() and torch.cuda.is_available():
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())

    def send(self, job: dict[str, Any]) -> None:
        """Give the process a job; `outcome` tells what became of it."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._memory[:8] = 0
        self._answer, self._moved = b"", (time.monotonic(), 0)
        line = json.dumps({**job, "memory_bytes": self._memory.numel()}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has died: `outcome` says so
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _start(self) -> None:
        self.stop()
        if self._fd < 0:
            self._reserve(HEADER_BYTES)
        # the trainer's own package, also where that is a checkout which no variable names
        ours = [] if _PACKAGE.name.endswith("-packages") else [str(_PACKAGE)]
        path = os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megafp8.checkpoint.background", str(self._fd)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(self._fd,),
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip

    def outcome(self) -> dict[str, Any] | None:
        """The answer to the last job, or None while it is under way; does not wait.

        Raises:
            MegaError: the job failed, or the process died or hangs.
        """
        assert self._process is not None and self._process.stdout is not None, "no job was sent"
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not self._answer.endswith(b"\n"):
                if not selector.select(timeout=0):
                    self._refuse_hung()
                    return None
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise CheckpointError(f"the process that writes checkpoints {_end_of(self._process)}")
                self._answer += read
        answer: dict[str, Any] = json.loads(self._answer)
        if "error" in answer:
            raise error_of(answer["error"], answer["exit_code"])
        return answer

    def _refuse_hung(self) -> None:
        done = int(self._memory[:8].view(torch.int64))
        now = time.monotonic()
        if done != self._moved[1]:
            self._moved = (now, done)
        if now - self._moved[0] > self._patience:
            raise CheckpointError(
                f"the process that writes checkpoints has written nothing for {self._patience:.0f} s "
                f"({done} bytes of this save before that); look at the disk"
            )

    def stop(self) -> None:
        """End the process, in the middle of a write too; the memory stays."""
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # what it has not read is lost with it
                    pipe.close()
            # in the hands of a hung disk it ends when the disk lets go
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            self._process = None

    def close(self) -> None:
        """End the process and give the memory back."""
        self.stop()
        self._unpin()
        self._memory, self._map = torch.empty(0, dtype=torch.uint8), None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def error_of(message: str, exit_code: int) -> MegaError:
    """The house error of a failure that another process tells of."""
    return (ResourceError if exit_code == ResourceError.exit_code else CheckpointError)(message)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    if code == -9:
        return "was killed (signal 9: out of memory?)"
    return f"died of signal {-code}" if code < 0 else f"ended with code {code}"


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
