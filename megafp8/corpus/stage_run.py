"""Runs the tasks of one stage: what is done stays, the rest goes to the executor, what fails is set aside.

Says so on one progress line, and in `log.jsonl`: an object a line with time, event, stage, task and counts.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megafp8.core.errors import ConfigError
from megafp8.core.log import event, get_logger
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.executors.interface import FINAL, Executor, Failure
from megafp8.corpus.progress import Progress
from megafp8.corpus.tasks import Task, checked_file, load_record

LOG = "log.jsonl"
_SHOWN = ("documents", "text_bytes", "tokens", "dropped")
_log = get_logger(__name__)


def open_executor(config: CorpusConfig) -> Executor:
    """The executor of the configured kind.

    Raises:
        ConfigError: it lacks a package, or a command.
    """
    try:
        module = importlib.import_module(f"megafp8.corpus.executors.{config.executor.kind}")
    except ImportError as error:
        kind = config.executor.kind
        raise ConfigError(f'executor.kind = "{kind}" needs a package: {error}; run `pip install {kind}`') from None
    executor: Executor = module.EXECUTOR(config)
    return executor


class StageRun:
    """Runs stages of one corpus.

    Args:
        stop: raise at the first refusal of data, instead of doing what else can be done.

    Attributes:
        tasks: all tasks that the corpus is made of, done or not.
        set_aside: the failures that were final.
    """

    def __init__(self, root: Path, executor: Executor, *, stop: bool = False) -> None:
        self.root, self._executor, self._stop = root, executor, stop
        self.tasks: list[Task] = []
        self._made: set[str] = set()  # in this call
        self.set_aside: list[Failure] = []

    def run(self, label: str, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """Records of the tasks, in order; {} for one that was set aside."""
        self.tasks += tasks
        records = {task.id: load_record(self.root, task) for task in tasks}
        todo = list({task.id: task for task in tasks if not records[task.id]}.values())
        if todo:
            listener = _Listener(self.root, label, tasks, records, self._stop)
            with listener.bar:
                self._executor.run(self.root, todo, listener)
            self.set_aside += listener.set_aside
            self._made |= {task.id for task in todo}
            records |= {task.id: load_record(self.root, task) for task in todo}
        return [records[task.id] for task in tasks]

    def output(self, task: Task, record: Mapping[str, Any], name: str) -> Path:
        """A task's output; one that an earlier call has made is compared with its checksum.

        Raises:
            DataError: it has changed.
        """
        one = task.output(record, name)
        path = self.root / one.path
        return path if task.id in self._made else checked_file(path, one.checksum)

    def stop_if_failed(self) -> None:
        """Raise if a task was set aside: what comes now needs all of them."""
        if not self.set_aside:
            return
        first = self.set_aside[0]
        if first.kind in FINAL:
            more = f" (and {len(self.set_aside) - 1} other tasks)" if len(self.set_aside) > 1 else ""
            raise first.error(f"{first.message}{more}; log: {first.log}")
        raise first.error(
            f"{len(self.set_aside)} tasks were set aside, first: {first.task.stage} {first.task.name}: "
            f"{first.message}; log: {first.log}; what can be made without them is made and stays; run the same command "
            "again to try them once more, or take their input out of source.files"
        )


class _Listener:
    """Adds up what tasks tell, for the progress line, and writes the log."""

    def __init__(
        self, root: Path, label: str, tasks: Sequence[Task], records: Mapping[str, dict[str, Any]], stop: bool
    ) -> None:
        self._file, self._stop = root / LOG, stop
        self.set_aside: list[Failure] = []
        self.bar = Progress(label, sum(task.num_bytes for task in tasks))
        self._done_bytes = sum(task.num_bytes for task in tasks if records[task.id])
        self._sums = dict.fromkeys(_SHOWN, 0)
        for task in tasks:
            self._add(shown_counts(records[task.id].get("counts", {})))
        self._running: dict[str, Mapping[str, int]] = {}
        self.bar.begin(**self._sums)

    def _add(self, counts: Mapping[str, int]) -> None:
        for name in _SHOWN:
            self._sums[name] += counts.get(name, 0)

    def _show(self) -> None:
        running = self._running.values()
        sums = {name: self._sums[name] + sum(c.get(name, 0) for c in running) for name in _SHOWN}
        self.bar.update(
            self._done_bytes + sum(c.get("done_bytes", 0) for c in running),
            **{name: count for name, count in sums.items() if count},
        )

    def progress(self, task: Task, counts: Mapping[str, int]) -> None:
        self._running[task.id] = counts
        self._show()

    def done(self, task: Task, record: Mapping[str, Any]) -> None:
        self._running.pop(task.id, None)
        self._done_bytes += task.num_bytes
        counts = shown_counts(record["counts"])
        self._add(counts)
        self._show()
        spent = {name: record[name] for name in ("seconds", "cpu_seconds") if name in record}
        self._write("done", task, **spent, num_bytes=task.num_bytes, **counts)

    def failed(self, failure: Failure) -> None:
        heard = self._running.pop(failure.task.id, {})
        if failure.kind == "died" and heard.get("documents"):  # it may be a document that kills
            where = f"last heard of at about document {heard['documents']} of it"
            failure = replace(failure, message=f"{failure.message}; {where}")
        what = "set aside" if failure.is_final else "tried again"
        if failure.is_final:
            self.set_aside.append(failure)
        self._write(what, failure.task, kind=failure.kind, message=failure.message, log=str(failure.log))
        if not failure.is_final or failure.kind not in FINAL:
            name = f"{failure.task.stage} {failure.task.name}"
            event(_log, f"task failed and is {what}", task=name, because=failure.message)
        if self._stop and failure.is_final and failure.kind in FINAL:
            raise failure.error(failure.message)

    def _write(self, what: str, task: Task, **values: Any) -> None:
        entry = {"time": round(time.time(), 3), "event": what, "stage": task.stage, "task": task.id, "name": task.name}
        with open(self._file, "a", encoding="utf-8") as log:
            log.write(json.dumps(entry | values, ensure_ascii=False) + "\n")


def shown_counts(counts: Mapping[str, Any]) -> dict[str, int]:
    """Of a record's counts what the progress line shows."""
    shown = {}
    if "train_documents" in counts:
        shown = {"documents": counts["train_documents"], "text_bytes": counts["train_bytes"]}
    if "num_records" in counts:
        dropped = sum(sum(reasons.values()) for reasons in counts["dropped"].values())
        shown = {"documents": counts["num_records"], "dropped": dropped}
    if "parts" in counts:
        shown["text_bytes"] = sum(part["text_bytes"] for part in counts["parts"])
    if "splits" in counts:
        splits = counts["splits"].values()
        shown |= {name: sum(split[name] for split in splits) for name in ("documents", "text_bytes", "tokens")}
    return shown
