"""Tasks in a Slurm job array that the run submits itself.

Done is what has a record; the queue is asked only whether anybody still works. A controller that forgets a job, a
queue that does not answer, elements that are held, killed, requeued or run twice: the run submits again while tasks
are left. Needs sbatch, squeue and scancel on PATH and a file system that all nodes share; sacct is not used.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megafp8.core.errors import ConfigError, ResourceError
from megafp8.core.jsonio import sealed, write_json
from megafp8.core.log import event, get_logger
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.executors.interface import Failure, Listener, log_path
from megafp8.corpus.executors.job import Job
from megafp8.corpus.folder import record_at
from megafp8.corpus.tasks import Task, load_record

_COMMANDS = ("sbatch", "squeue", "scancel")
_DEFAULT_WORKERS = 16
_FRUITLESS = 4  # arrays in a row that end without a task done
_HELD = ("JobHeldUser", "JobHeldAdmin", "launch failed requeued held", "launch_failed_requeued_held")
_log = get_logger(__name__)


class Slurm:
    """One array of `output.workers` elements for each stage; each element takes tasks until none is left."""

    def __init__(self, config: CorpusConfig) -> None:
        missing = [name for name in _COMMANDS if shutil.which(name) is None]
        if missing:
            raise ConfigError(
                f'executor.kind = "slurm": {", ".join(missing)} not found on PATH; run it where Slurm\'s commands are, '
                'or use "local"'
            )
        self._config = config.executor
        self._workers = config.output.workers or _DEFAULT_WORKERS
        self._job_ids: list[str] = []

    def run(self, root: Path, tasks: Sequence[Task], listener: Listener) -> None:
        # absolute: elements start elsewhere, though they change into this folder for the inputs' sake
        job = Job.at(root.absolute(), tasks, self._config.retries, self._config.lease_seconds)
        left = {task.id: task for task in tasks}
        self._job_ids = self._adopted(job)
        if not self._job_ids:
            job.write()
            self._submit(job, len(left))
        fruitless = 0
        while left:
            before = len(left)
            self._collect(job, left, listener)
            fruitless = 0 if len(left) < before else fruitless
            if not left:
                break
            if self._active() == 0:
                self._collect(job, left, listener)  # the last may have ended between the two questions
                if left:
                    fruitless += 1
                    if fruitless >= _FRUITLESS:
                        raise ResourceError(self._no_progress(job))
                    event(_log, "the queue holds no work of ours, submitting the rest", tasks=len(left))
                    self._submit(job, len(left))
            time.sleep(self._config.poll_seconds)
        self.close()

    def _adopted(self, job: Job) -> list[str]:
        """The arrays of an earlier call on the same tasks that still work."""
        known = record_at(job.folder / "slurm.json").get("job_ids", [])
        if known and self._active(known):
            event(_log, "an array of an earlier call still works on these tasks", jobs=",".join(known))
            return list(known)
        if known:
            self._call("scancel", *known)
        return []

    def _collect(self, job: Job, left: dict[str, Task], listener: Listener) -> None:
        """Take out of `left` what is done or set aside."""
        names = {stage: _names(job.root / stage) for stage in {task.stage for task in left.values()}}
        given_up = _names(job.folder)
        for task in list(left.values()):
            if f"{task.id}.json" in names[task.stage] and (record := load_record(job.root, task)):
                listener.done(task, record)
                del left[task.id]
            elif f"{task.id}.failed" in given_up:
                why = job.failure(task)
                listener.failed(Failure(task, why["kind"], why["message"], log_path(job.root, task), True))
                del left[task.id]

    def _submit(self, job: Job, num_tasks: int) -> None:
        elements = min(self._workers, num_tasks)
        words = [sys.executable, "-m", "megafp8.corpus.executors.job", str(job.folder)]
        script = f'#!/bin/sh\nexec {shlex.join(words)} "$SLURM_ARRAY_TASK_ID" {elements}\n'
        options = [
            "--parsable", "--requeue", "--open-mode=append", f"--array=0-{elements - 1}", "--job-name=megafp8-corpus",
            f"--chdir={os.getcwd()}", f"--output={job.folder}/%A_%a.out", *self._config.options,
        ]  # fmt: skip
        for attempt in range(5):
            done = self._call("sbatch", *options, given=script)
            number = done.stdout.strip().partition(";")[0]
            if done.returncode == 0 and number:
                self._job_ids.append(number)
                write_json(job.folder / "slurm.json", sealed({"kind": "megafp8-slurm", "job_ids": self._job_ids}))
                return
            if "nvalid" in done.stderr:  # a partition, option or account that does not exist: no use to ask again
                break
            event(_log, "sbatch failed, trying again", because=done.stderr.strip(), attempt=attempt + 1)
            time.sleep(self._config.poll_seconds)
        raise ResourceError(f"sbatch refuses: {_last_line(done.stderr)}; correct executor.options or ask your cluster")

    def _active(self, job_ids: Sequence[str] = ()) -> int | None:
        """How many elements the queue holds; None if it does not answer. Held ones are released."""
        job_ids = job_ids or self._job_ids
        asked = ["--noheader", "--array", f"--jobs={','.join(job_ids)}", "--format=%i|%T|%r"]
        done = self._call("squeue", *asked)
        if done.returncode:
            return 0 if "nvalid job id" in done.stderr else None
        rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") >= 2]
        for number, _, reason, *_ in rows:
            if reason.strip() in _HELD:
                event(_log, "an element is held, releasing it", job=number, because=reason)
                self._call("scontrol", "release", number.strip())
        return len(rows)

    def _no_progress(self, job: Job) -> str:
        logs = sorted(job.folder.glob("*.out"), key=lambda path: path.stat().st_mtime)
        last = _last_line(logs[-1].read_text(errors="replace")) if logs else "no element left an output"
        return (
            f"{_FRUITLESS} Slurm arrays in a row ended without a task done; {last}; see {job.folder}/*.out, "
            "then run the same command again"
        )

    @staticmethod
    def _call(*words: str, given: str = "") -> Any:
        """One of Slurm's commands; a missing one, or one that hangs, fails."""
        try:
            return subprocess.run(words, input=given, capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(words, 1, "", str(error))

    def close(self) -> None:
        if self._job_ids:
            self._call("scancel", *self._job_ids)
        self._job_ids = []


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]


EXECUTOR = Slurm
