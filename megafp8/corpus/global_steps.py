"""A global step as stages: signatures of each part -> partition -> edges -> links -> map, which drops and goes on.

Parts are numbered in the order of the input, those that are held out for validation before all others; of duplicates
the first stays, so that a validation document does not go because the training text has it too: there it goes. A part
that loses nothing, with no step behind the global one, is not written again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.dedup import passes
from megafp8.corpus.mapping import step_values
from megafp8.corpus.parts import View
from megafp8.corpus.stage_run import StageRun
from megafp8.corpus.stages import edges as edges_stage
from megafp8.corpus.stages import links as links_stage
from megafp8.corpus.stages import partition as partition_stage
from megafp8.corpus.stages import signatures as signatures_stage
from megafp8.corpus.step_registry import make_step
from megafp8.corpus.tasks import Input, Task

Done = list[tuple[Task, dict[str, Any]]]


@dataclass(frozen=True)
class Segment:
    """Steps of one document at a time, behind a global step (or the first of all: behind none)."""

    global_step: Mapping[str, Any] | None
    steps: list[Mapping[str, Any]]


def segments(tables: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """`[[steps]]` cut at the global ones; the first segment is what reading does."""
    found = [Segment(None, [])]
    for table in tables:
        if hasattr(make_step(table), "apply"):
            found[-1].steps.append(table)
        else:
            found.append(Segment(table, []))
    return found


def deduplicate(
    run: StageRun, segment: Segment, views: Sequence[View], config: CorpusConfig
) -> tuple[list[View], Done, dict[str, Any]]:
    """The views behind a segment, in the order of those before it, the tasks of `map` with their records, and
    {step: clusters of duplicates}."""
    assert segment.global_step is not None
    step, memory = step_values(segment.global_step), config.executor.memory_bytes
    kind = segment.global_step["kind"]
    order = sorted(range(len(views)), key=lambda at: not views[at].held_out)  # stable
    views = [views[at] for at in order]
    hints = {"memory_bytes": memory}
    tasks = [Task("signatures", v.part.path, {"step": step}, v.inputs, hints, v.text_bytes) for v in views]
    signed = _run(run, f"{kind}: signatures", tasks)
    records = [task.output(record, signatures_stage.RECORDS) for task, record in signed]
    names = [task.output(record, signatures_stage.NAMES) for task, record in signed]
    edges = _edges(run, kind, records, memory)
    made = make_step(segment.global_step)
    values = {"num_edges": len(edges), "unit": made.unit}
    ((task, record),) = _run(
        run, f"{kind}: links", [Task("links", kind, values, (*edges, *names), hints, _size(edges))]
    )
    left, done = _map(run, segment, step, views, task, record, config)
    clusters = record["counts"]["clusters"]
    behind = [view for _, some in sorted(zip(order, left)) for view in some]
    return behind, done, {made.name: clusters} if clusters else {}


def _edges(run: StageRun, kind: str, records: Sequence[Input], memory: int) -> list[Input]:
    tasks = []
    for group in passes.groups([one.num_bytes for one in records], memory):
        inputs = tuple(records[number] for number in group)
        tasks.append(Task("partition", f"{kind}[{group.start}:{group.stop}]", {"first": group.start}, inputs))
    found = _run(run, f"{kind}: partitions", tasks)
    edges = [task.output(record, partition_stage.EDGES) for task, record in found]
    if len(found) < 2:  # what was looked at together has no edges between
        return edges
    runs = tuple(task.output(record, partition_stage.RUN) for task, record in found)
    count = passes.num_ranges(_size(runs), memory)
    tasks = [Task("edges", f"{kind} {at}/{count}", {"at": at, "count": count}, runs) for at in range(count)]
    found = _run(run, f"{kind}: edges", tasks)
    return edges + [task.output(record, edges_stage.EDGES) for task, record in found]


def _map(
    run: StageRun,
    segment: Segment,
    step: dict[str, Any],
    views: Sequence[View],
    links: Task,
    record: Mapping[str, Any],
    config: CorpusConfig,
) -> tuple[list[list[View]], Done]:
    """What is left of each view, and the tasks that ran."""
    values = {"steps": [step_values(one) for one in segment.steps], "part_bytes": config.executor.part_bytes}
    hints = {"on_error": config.source.on_error}
    lost = {int(part) for part in record["counts"]["lost"]}
    tasks: dict[int, Task] = {}
    for number, view in enumerate(views):
        if number in lost:
            said = (links_stage.rows_name(number), links_stage.kept_name(number), links_stage.NAMES)
            inputs = (*view.inputs, *(links.output(record, name) for name in said))
            more = {"global": step}
        elif segment.steps:
            inputs, more = view.inputs, {}
        else:
            continue
        tasks[number] = Task("map", view.part.path, values | more, inputs, hints, view.text_bytes)
    done = dict(zip(tasks, _run(run, f"{step['kind']}: dropping", list(tasks.values()))))
    left = [views_of(*done[number]) if number in done else [view] for number, view in enumerate(views)]
    return left, list(done.values())


def views_of(task: Task, record: Mapping[str, Any]) -> list[View]:
    """The parts that a task of `read` or `map` has made."""
    parts = record["counts"]["parts"]
    return [View(task.output(record, one["name"]), one["rows"], one["text_bytes"], one["held_out"]) for one in parts]


def _run(run: StageRun, label: str, tasks: list[Task]) -> Done:
    records = run.run(label, tasks)
    run.stop_if_failed()
    return list(zip(tasks, records))


def _size(inputs: Sequence[Input]) -> int:
    return sum(one.num_bytes for one in inputs)
