"""Which tasks a corpus is made of: pure functions of configuration, inputs, and records of earlier stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from megafp8.core.config import to_dict
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.global_steps import segments, views_of
from megafp8.corpus.identity import source_values, training_values
from megafp8.corpus.mapping import step_values
from megafp8.corpus.parts import View
from megafp8.corpus.readers import Source
from megafp8.corpus.shards import Shard, is_large, outside, plan_shards, ranges, shard_values
from megafp8.corpus.stages.sample import TEXTS
from megafp8.corpus.storage import is_url
from megafp8.corpus.tasks import Task
from megafp8.data.indexed import optimal_dtype
from megafp8.data.marks import Marks
from megafp8.data.tokenizer import Tokenizer, identity

Cuts = Mapping[str, Sequence[Mapping[str, int]]]  # as for `plan_shards`


class Planner:
    """Makes the tasks of each stage."""

    def __init__(self, config: CorpusConfig, source: Source) -> None:
        self._config, self._source = config, source
        self._held_out: set[str] = getattr(source, "held_out", set())
        self._source_values = source_values(config)["source"]
        self.marks = Marks(config.tokenizer.add_bos, config.tokenizer.append_eos)

    @cached_property
    def is_one_pass(self) -> bool:
        """Whether the tasks of `tokenize` read the input themselves, without parts between.

        So it is where no step's work is to be kept, lines are cheap to read twice (`check` does), and no compressed
        file would make one task much longer than others. It does not depend on the number of workers.
        """
        config, size = self._config, self._config.executor.shard_bytes
        if not config.tokenizer.path or config.steps or config.source.kind != "jsonl":
            return False
        files = self._source.files
        return all(
            not is_url(one.path) and (one.num_bytes <= size or is_large(one, config.source, size)) for one in files
        )

    def split_tasks(self) -> dict[str, list[Task]]:
        """For each file that is read by several tasks: the tasks that look for its line ends."""
        size, found = self._config.executor.shard_bytes, {}
        for file in self._source.files:
            if is_large(file, self._config.source, size):
                found[file.path] = [
                    Task("split", f"{file.path}[{a}:{b}]", {}, (outside(file, a, b),), num_bytes=b - a)
                    for a, b in ranges(file, size)
                ]
        return found

    def shards(self, cuts: Cuts) -> list[Shard]:
        """The shards of the input."""
        return plan_shards(self._source.files, self._config.source, self._config.executor.shard_bytes, cuts)

    def read_tasks(self, cuts: Cuts) -> list[Task]:
        """A task for each shard."""
        return self._shard_tasks("read", cuts, {"part_bytes": self._config.executor.part_bytes}, {})

    def _shard_tasks(
        self, stage: str, cuts: Cuts, more_values: Mapping[str, Any], more_hints: Mapping[str, Any]
    ) -> list[Task]:
        """A task for each shard, with the steps up to the first global one."""
        steps = [step_values(table) for table in segments(self._config.steps)[0].steps]
        hints = {"on_error": self._config.source.on_error, **more_hints}
        tasks = []
        for shard in self.shards(cuts):
            values = shard_values(shard, self._source_values, self._held_out) | {"steps": steps, **more_values}
            tasks.append(Task(stage, shard.name, values, shard.inputs, hints, shard.num_bytes))
        return tasks

    def views(self, tasks: Sequence[Task], records: Sequence[Mapping[str, Any]]) -> list[View]:
        """The parts that have been read; those of tasks that were set aside are missing."""
        return [view for task, record in zip(tasks, records) if record for view in views_of(task, record)]

    def tokenizer_task(self, tasks: Sequence[Task], records: Sequence[Mapping[str, Any]]) -> Task:
        """Training, on what the tasks of `sample` have found."""
        settings = training_values(self._config)
        inputs = tuple(task.output(record, TEXTS) for task, record in zip(tasks, records))
        values = {"tokenizer": settings, "seed": self._config.split.seed}
        return Task("tokenizer", "tokenizer", values, inputs)

    def tokenize_tasks(self, views: Sequence[View], spec: str, tokenizer: Tokenizer) -> list[Task]:
        """A task for each part."""
        values, hints = self._token_values(tokenizer), {"tokenizer": spec}
        return [Task("tokenize", v.part.path, values, v.inputs, hints, v.text_bytes) for v in views]

    def one_pass_tasks(self, cuts: Cuts, spec: str, tokenizer: Tokenizer) -> list[Task]:
        """A task for each shard, which reads it too."""
        return self._shard_tasks("tokenize", cuts, self._token_values(tokenizer), {"tokenizer": spec})

    def _token_values(self, tokenizer: Tokenizer) -> dict[str, Any]:
        split, dtype = to_dict(self._config.split), optimal_dtype(tokenizer.vocab_size).name
        return {"tokenizer": tokenizer.fingerprint, "dtype": dtype, "split": split, **self.marks.to_json()}

    def write_task(
        self,
        pieces: Sequence[tuple[Task, Mapping[str, Any]]],
        split: str,
        tokenizer: Tokenizer,
        summary: Mapping[str, Any],
    ) -> Task:
        """Joining the pieces of a split; `summary` goes into its side file."""
        inputs = tuple(
            task.output(record, f"{split}.{what}")
            for task, record in pieces
            if record["counts"]["splits"][split]["documents"]
            for what in ("ids", "lengths")
        )
        values = {
            "split": split,
            "dtype": pieces[0][0].values["dtype"],
            "vocab_size": tokenizer.vocab_size,
            "metadata": {"tokenizer": identity(tokenizer) | self.marks.to_json(), **summary},
        }
        output = self._config.output
        values |= {"shuffle_seed": output.shuffle_seed} if output.shuffle else {}
        hints = {"memory_bytes": self._config.executor.memory_bytes}
        return Task("write", split, values, inputs, hints, sum(one.num_bytes for one in inputs))
