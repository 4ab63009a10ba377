"""`preprocess --plan`: what would run, how much of it is done, and about how long and how large it is. Runs nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megafp8.corpus import folder as places
from megafp8.corpus.compressed import is_plain
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.global_steps import segments
from megafp8.corpus.identity import corpus_fingerprint, open_source
from megafp8.corpus.parts import View
from megafp8.corpus.planning import Cuts, Planner
from megafp8.corpus.readers import Source
from megafp8.corpus.shards import plan_shards
from megafp8.corpus.stage_run import LOG
from megafp8.corpus.stages.tokenizer import MODEL
from megafp8.corpus.tasks import Task, load_record
from megafp8.corpus.tokenizer_check import COMPRESSION, MAX_PARTS, check_tasks
from megafp8.corpus.tokenizer_sample import first_shares, sample_tasks
from megafp8.data.indexed import optimal_dtype
from megafp8.data.tokenizer import Tokenizer, load_tokenizer

# bytes for each second and process before anything has been measured; docs/corpus.md says where they come from
_RATES = {
    "split": 1e9, "read": 40e6, "signatures": 8e6, "partition": 100e6, "edges": 100e6, "links": 100e6, "map": 20e6,
    "sample": 60e6, "tokenizer": 5e6, "check": 30e6, "tokenize": 4e6, "write": 200e6,
}  # fmt: skip
_RECORD_SHARE = 0.1  # bytes of a global step's records for each byte of text (MinHash, 14 bands, 2 kB documents)
_PART_SHARE = 0.35  # bytes of a part for each byte of text
_BYTES_PER_TOKEN = 4.0


@dataclass(frozen=True)
class Row:
    """One stage.

    Attributes:
        is_exact: False: the stage before has to run before its tasks are known.
        num_bytes: of what is left to be done.
        seconds: of all processes together.
        disk: bytes that all its outputs take.
    """

    stage: str
    tasks: int
    done: int
    is_exact: bool
    num_bytes: float
    seconds: float
    disk: float


@dataclass(frozen=True)
class Plan:
    """All stages; `workers` is how many processes share the work."""

    rows: list[Row]
    input_bytes: int
    workers: int

    @property
    def seconds(self) -> float:
        """Of wall time: each stage by its processes, as many as it has tasks for."""
        return sum(row.seconds / max(1, min(self.workers, row.tasks - row.done)) for row in self.rows)

    @property
    def disk(self) -> float:
        """Bytes in the output folder at the end."""
        return sum(row.disk for row in self.rows)


def make_plan(config: CorpusConfig) -> Plan:
    """The plan of a corpus; inputs are found, and of records only those that are there are read.

    Raises:
        DataError: no input.
    """
    source = open_source(config.source)
    root = Path(config.output.folder) / places.STAGES
    text = sum(file.num_bytes * (1.0 if is_plain(file.path) else COMPRESSION) for file in source.files)
    draft = _Draft(config, source, Planner(config, source), root, text, _RATES | _measured(root))
    if draft.planner.is_one_pass:
        draft.one_pass(load_tokenizer(config.tokenizer.path))
    else:
        views = draft.read()
        draft.tokens(views, *(draft.tokenizer(views) or ()))
    workers = config.output.workers or (os.cpu_count() or 1 if config.executor.kind == "local" else 16)
    return Plan(draft.rows, sum(file.num_bytes for file in source.files), workers)


@dataclass
class _Draft:
    """Goes from stage to stage as far as records tell what the next one's tasks are; guesses from there on."""

    config: CorpusConfig
    source: Source
    planner: Planner
    root: Path
    text: float
    rates: dict[str, float]
    rows: list[Row] = field(default_factory=list)

    def exact(self, stage: str, tasks: Sequence[Task], disk: float) -> list[dict[str, Any]]:
        """Enter a stage whose tasks are known; returns their records, or [] if some are not done."""
        records = [load_record(self.root, task) for task in tasks]
        left = sum(task.num_bytes for task, record in zip(tasks, records) if not record)
        done = sum(map(bool, records))
        if tasks:
            self.rows.append(Row(stage, len(tasks), done, True, left, left / self.rates[stage], disk))
        return records if all(records) else []

    def guess(self, stage: str, tasks: int, num_bytes: float, disk: float) -> None:
        self.rows.append(Row(stage, tasks, 0, False, num_bytes, num_bytes / self.rates[stage], disk))

    def cut(self) -> tuple[int, Cuts | None]:
        """How many tasks look at shards, about, and where large files are cut, or None if it is not known yet."""
        split_tasks = self.planner.split_tasks()
        flat = [task for tasks in split_tasks.values() for task in tasks]
        records = self.exact("split", flat, 0.0)
        if len(records) < len(flat):
            small = [file for file in self.source.files if file.path not in split_tasks]
            shards = plan_shards(small, self.config.source, self.config.executor.shard_bytes, {})
            return len(shards) + len(flat), None
        numbered = iter(records)
        cuts = {path: [next(numbered)["counts"] for _ in tasks] for path, tasks in split_tasks.items()}
        return len(self.planner.shards(cuts)), cuts

    def one_pass(self, tokenizer: Tokenizer) -> None:
        """The stages of a corpus whose tasks read and tokenize."""
        count, cuts = self.cut()
        num_bytes, disk = sum(file.num_bytes for file in self.source.files), self.disk_of_ids(tokenizer.vocab_size)
        if cuts is None:
            checked = min(1.0, MAX_PARTS / count) * num_bytes
            self.guess("check", min(count, MAX_PARTS), checked, 0.0)
            self.guess("tokenize", count, num_bytes, disk)
        else:
            tasks = self.planner.one_pass_tasks(cuts, self.config.tokenizer.path, tokenizer)
            self.exact("check", check_tasks(tasks, self.config.split.seed), 0.0)
            self.exact("tokenize", tasks, disk)
        self.write(tokenizer, disk)

    def read(self) -> list[View] | None:
        """The parts, or None if they are not all there."""
        (count, cuts), disk = self.cut(), _PART_SHARE * self.text
        if cuts is None:
            self.guess("read", count, sum(file.num_bytes for file in self.source.files), disk)
            self.global_steps()
            return None
        tasks = self.planner.read_tasks(cuts)
        records = self.exact("read", tasks, disk)
        if not records:
            self.global_steps()
            return None
        views = self.planner.views(tasks, records)
        self.text = sum(view.text_bytes for view in views)
        return None if self.global_steps() else views

    def global_steps(self) -> int:
        """Guess the stages of global steps; returns how many there are."""
        count, records = len(segments(self.config.steps)) - 1, _RECORD_SHARE * self.text
        for _ in range(count):
            self.guess("signatures", self.parts, self.text, records)
            self.guess("partition", max(1, round(5 * records / self.config.executor.memory_bytes)), records, records)
            self.guess("links", 1, records / 10, records / 10)
            self.guess("map", self.parts, self.text, _PART_SHARE * self.text)
        return count

    @property
    def parts(self) -> int:
        """About how many there will be."""
        read = next(row for row in self.rows if row.stage == "read")
        return max(read.tasks, round(self.text / self.config.executor.part_bytes))

    def tokenizer(self, views: list[View] | None) -> tuple[str, Tokenizer] | None:
        """The tokenizer, if there is one already, and where it is."""
        if path := self.config.tokenizer.path:
            return path, load_tokenizer(path)
        sampled = min(self.text, self.config.tokenizer.train_bytes)
        records: list[dict[str, Any]] = []
        if views:
            tasks = sample_tasks(views, first_shares(views, self.config), self.config)
            records = self.exact("sample", tasks, _PART_SHARE * sampled)
        else:
            self.guess("sample", self.parts, self.text, _PART_SHARE * sampled)
        if not records:
            self.guess("tokenizer", 1, sampled, 0.0)
            return None
        task = self.planner.tokenizer_task(tasks, records)
        if not self.exact("tokenizer", [task], 0.0):
            return None
        made = self.root / task.output(load_record(self.root, task), MODEL).path
        return str(made), load_tokenizer(made)

    def tokens(self, views: list[View] | None, spec: str = "", tokenizer: Tokenizer | None = None) -> None:
        """The stages behind the tokenizer."""
        disk = self.disk_of_ids(tokenizer.vocab_size if tokenizer else self.config.tokenizer.vocab_size)
        if not (views and tokenizer):
            checked = min(self.text, MAX_PARTS * self.config.executor.part_bytes)
            self.guess("check", min(self.parts, MAX_PARTS), checked, 0.0)
            self.guess("tokenize", self.parts, self.text, disk)
            self.guess("write", 2, disk, disk)
            return
        tasks = self.planner.tokenize_tasks(views, spec, tokenizer)
        self.exact("check", check_tasks(tasks, self.config.split.seed), 0.0)
        self.exact("tokenize", tasks, disk)
        self.write(tokenizer, disk)

    def disk_of_ids(self, vocab_size: int) -> float:
        """Bytes of all ids."""
        return self.text / _BYTES_PER_TOKEN * optimal_dtype(vocab_size).itemsize

    def write(self, tokenizer: Tokenizer, disk: float) -> None:
        """The last stage, whose tasks no record but the manifest tells."""
        named = tokenizer.fingerprint if self.config.tokenizer.path else ""
        manifest = places.record_at(self.root.parent / places.MANIFEST)
        if manifest.get("config_fingerprint") == corpus_fingerprint(self.config, named) and not self.left:
            self.rows.append(Row("write", 2, 2, True, 0, 0, disk))
        else:
            self.guess("write", 2, disk, disk)

    @property
    def left(self) -> int:
        """Tasks to be done, of the stages so far."""
        return sum(row.tasks - row.done for row in self.rows)


def _measured(root: Path) -> dict[str, float]:
    """Bytes for each second and process of the stages that have run here."""
    sums: dict[str, list[float]] = {}
    if (root / LOG).is_file():
        for line in (root / LOG).read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            if entry.get("event") == "done" and entry["num_bytes"] and entry["seconds"]:
                found = sums.setdefault(entry["stage"], [0.0, 0.0])
                found[0] += entry["num_bytes"]
                found[1] += entry["seconds"]
    return {stage: num_bytes / seconds for stage, (num_bytes, seconds) in sums.items()}
