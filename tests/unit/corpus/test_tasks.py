"""Tasks: what their id depends on, when they are done, two copies at once, and how inputs are dealt to them."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.core.errors import DataError
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Document, parse
from megafp8.corpus.readers import FileSource, InputFile, find_files
from megafp8.corpus.shards import Shard, outside, plan_shards, ranges, read_shard
from megafp8.corpus.stages import split
from megafp8.corpus.tasks import Input, Task, Work, load_record, run_task, sweep


@pytest.fixture
def task(tmp_path: Path) -> Task:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    values = {
        "source": {"kind": "jsonl"}, "steps": [], "held_out": [], "first_line": 1, "part_bytes": 100,
    }  # fmt: skip
    return Task("read", "a", values, (outside(find_files((str(path),))[0]),))


def test_id_is_of_content(task: Task) -> None:
    assert dataclasses.replace(task, name="b", hints={"x": 1}, num_bytes=5).id == task.id
    assert dataclasses.replace(task, values={**task.values, "part_bytes": 1}).id != task.id
    touched = dataclasses.replace(task.inputs[0], mtime_ns=1)
    assert dataclasses.replace(task, inputs=(touched,)).id == task.id
    grown = dataclasses.replace(task.inputs[0], num_bytes=1)
    assert dataclasses.replace(task, inputs=(grown,)).id != task.id
    a, b = Input("read/x.zst", 3, "xxh3_128:0"), Input("read/y.zst", 3, "xxh3_128:0")
    assert Task("tokenize", "", {}, (a,)).id == Task("tokenize", "", {}, (b,)).id, "same bytes, same work"
    assert Task.from_json(json.loads(json.dumps(task.to_json()))).id == task.id


def test_version_of_a_stage_is_part_of_the_id(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    before = task.id
    monkeypatch.setattr("megafp8.corpus.stages.read.VERSION", 99)
    assert dataclasses.replace(task).id != before


def test_done_if_record_and_outputs_are_there(task: Task, tmp_path: Path) -> None:
    root = tmp_path / "stages"
    assert not load_record(root, task)
    record = run_task(root, task)
    assert load_record(root, task) == record and record["counts"]["kept"] == 2
    assert sorted(path.name for path in (root / "read").iterdir()) == [f"{task.id}.00000.docs.zst", f"{task.id}.json"]
    assert run_task(root, task) == record, "nothing to do"
    output = root / "read" / f"{task.id}.00000.docs.zst"
    data = output.read_bytes()
    for damage in (lambda: output.unlink(), lambda: output.write_bytes(data[:-1])):
        damage()
        assert not load_record(root, task)
        run_task(root, task)
        assert output.read_bytes() == data
    (root / "read" / f"{task.id}.json").write_text('{"kind": "megafp8-task"')
    assert not load_record(root, task)


def test_same_size_and_other_text_is_noticed_by_its_time(task: Task, tmp_path: Path) -> None:
    root = tmp_path / "stages"
    run_task(root, task)
    path = Path(task.inputs[0].path)
    os.utime(path, (1, 1))
    again = dataclasses.replace(task, inputs=(outside(find_files((str(path),))[0]),))
    assert load_record(root, again), "touched, the same bytes"
    path.write_text(path.read_text().replace("one", "ONE"))
    again = dataclasses.replace(task, inputs=(outside(find_files((str(path),))[0]),))
    assert again.id == task.id and not load_record(root, again)
    run_task(root, again)
    assert load_record(root, again)


def test_changed_output_is_refused_and_made_again(task: Task, tmp_path: Path) -> None:
    root = tmp_path / "stages"
    record = run_task(root, task)
    output = root / "read" / f"{task.id}.00000.docs.zst"
    data = bytearray(output.read_bytes())
    data[-3] ^= 1
    output.write_bytes(bytes(data))
    values = {"split": {"valid_share": 0.0, "seed": 1}, "limits": {"": 2**64}}
    sample = Task("sample", "s", values, (task.output(record, "00000.docs.zst"),))
    with pytest.raises(DataError, match="changed since it was made; run the same command again"):
        run_task(root, sample)
    assert not load_record(root, task)
    run_task(root, task)
    assert run_task(root, sample)["counts"]["train_documents"] == 2


def test_copies_that_run_at_once_do_no_harm(task: Task, tmp_path: Path) -> None:
    root, errors = tmp_path / "stages", []

    def attempt() -> None:
        try:
            run_task(root, task)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and load_record(root, task)
    assert len(list((root / "read").iterdir())) == 2, "no temporary folder is left"


def test_failed_task_leaves_nothing(task: Task, tmp_path: Path) -> None:
    wrong = dataclasses.replace(task, values={**task.values, "source": {"kind": "jsonl", "text_key": ""}})
    with pytest.raises(Exception, match="text_key"):
        run_task(tmp_path / "stages", wrong)
    assert list((tmp_path / "stages" / "read").iterdir()) == []


def test_sweep_keeps_what_is_in_use(task: Task, tmp_path: Path) -> None:
    root = tmp_path / "stages"
    run_task(root, task)
    kept = sorted((root / "read").iterdir())
    run_task(root, dataclasses.replace(task, values={**task.values, "part_bytes": 7}))
    (root / "read" / f".{task.id}.0000").mkdir()
    (root / "read" / f"{task.id}.log").write_text("x")
    sweep(root, [task])
    assert sorted((root / "read").iterdir()) == kept


def lines_of(files: list[InputFile], shard_bytes: int, tmp_path: Path) -> list[tuple[int, str]]:
    """(line, text) of all documents as shards of so many bytes give them."""
    config = SourceConfig(kind="jsonl", files=tuple(file.path for file in files))
    cuts = {}
    for file in files:
        if file.num_bytes > shard_bytes:
            tasks = [Task("split", "", {}, (outside(file, a, b),)) for a, b in ranges(file, shard_bytes)]
            cuts[file.path] = [split.run(Work(tmp_path, task, tmp_path)) for task in tasks]
    shards = plan_shards(files, config, shard_bytes, cuts)
    assert sum(shard.num_bytes for shard in shards) == sum(file.num_bytes for file in files)
    found = []
    for shard in shards:
        values = {"held_out": [], "first_line": shard.first_line}
        work = Work(tmp_path, Task("read", "", values, shard.inputs), tmp_path)
        for record, _ in read_shard(work, config):
            document = parse(record, config)
            if document is not None:
                assert isinstance(document, Document)
                found.append((record.line, document.text))
    return found


def test_ranges_give_the_lines_of_the_whole_file(tmp_path: Path) -> None:
    """Every size of a range from 1 byte to the whole file, with blank lines and none at the end."""
    rng = random.Random(3)
    data = b"\n".join(b'{"text": "%s"}' % (b"x" * rng.randrange(12)) if rng.random() < 0.8 else b"" for _ in range(14))
    path = tmp_path / "a.jsonl"
    for ending in (b"", b"\n", b"\n\n"):
        path.write_bytes(data + ending)
        files = find_files((str(path),))
        whole = lines_of(files, 10**6, tmp_path)
        for size in range(1, len(data) + 3):
            assert lines_of(files, size, tmp_path) == whole, size


def test_nasty_files_survive_being_cut(tmp_path: Path) -> None:
    nasty = Path(__file__).parents[2] / "nasty"
    for path in sorted(nasty.glob("*.jsonl")):
        files = find_files((str(path),))
        config = SourceConfig(kind="jsonl", files=(str(path),))
        whole = [(record.line, record.data) for record in FileSource(config).records()]
        for size in (7, 64, 300):
            cuts = {}
            if files[0].num_bytes > size and path.name not in ("utf16.jsonl", "plain_named_gz.jsonl"):
                tasks = [Task("split", "", {}, (outside(files[0], a, b),)) for a, b in ranges(files[0], size)]
                cuts[files[0].path] = [split.run(Work(tmp_path, task, tmp_path)) for task in tasks]
            found = []
            for shard in plan_shards(files, config, size, cuts):
                values = {"held_out": [], "first_line": shard.first_line}
                work = Work(tmp_path, Task("read", "", values, shard.inputs), tmp_path)
                found += [(record.line, record.data) for record, _ in read_shard(work, config)]
            assert found == whole, (path.name, size)


def test_added_file_moves_few_shards() -> None:
    config = SourceConfig(kind="text", files=("x",))
    files = [InputFile(f"doc{i:05d}.txt", 1000 + i % 500, 0) for i in range(5000)]

    def groups(found: list[InputFile]) -> set[tuple[InputFile, ...]]:
        return {shard.files for shard in plan_shards(found, config, 100_000, {})}

    before = groups(files)
    added = groups(sorted([*files, InputFile("doc02500a.txt", 50, 0)], key=lambda file: file.path))
    assert 50 < len(before) < 250 and len(before - added) <= 3
    assert all(Shard(files=group).num_bytes < 103_000 for group in before)


def test_a_million_small_files_are_dealt_in_seconds() -> None:
    config = SourceConfig(kind="text", files=("x",))
    files = [InputFile(f"doc{i:07d}.txt", 500, 0) for i in range(300_000)]
    start = time.process_time()
    shards = plan_shards(files, config, 1 << 26, {})
    assert sum(len(shard.files) for shard in shards) == len(files)
    assert time.process_time() - start < 5  # 0.4 s; with a sum over the group for each file it was minutes


def test_a_changed_step_changes_reading_only(config: Callable) -> None:
    from megafp8.corpus.identity import open_source
    from megafp8.corpus.planning import Planner

    def ids(made) -> list[str]:  # type: ignore[no-untyped-def]
        return [task.id for task in Planner(made, open_source(made.source)).read_tasks({})]

    plain = ids(config())
    assert ids(config(tokenizer={"vocab_size": 400}, split={"seed": 9}, output={"workers": 3})) == plain
    assert ids(config(source={"max_bad_share": 0.5, "keep_damaged_files": True})) == plain
    assert ids(config(steps=[{"kind": "length"}])) != plain
    assert ids(config(steps=[{"kind": "length"}])) != ids(config(steps=[{"kind": "length", "min_characters": 2}]))
