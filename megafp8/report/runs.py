"""A run folder as the report sees it: records of metrics.jsonl by kind, run.json, the configuration.

Only reads. A record that a crash cut short at the end of the file is left out and noted; a broken one before it is an
error, for then something else has damaged the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.core.config import load_toml
from megafp8.core.errors import ConfigError, DataError
from megafp8.core.jsonio import read_json

Record = dict[str, Any]
_LABELS = {"mxfp8": "MXFP8", "nvfp4": "NVFP4"}


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: unique within a report.
        train: training records by rising step, the last one of a step that was done twice.
        evals: validation records by set name, each by rising step.
        fp8: records of FP8 statistics by rising step; empty for a run without.
        events: saved, resumed, preempted, ... in the order in which they happened.
        facts: run.json; empty if there is none.
        config: the resolved configuration; empty if there is none.
        changed: dotted keys that differ from their default -> (default, value), both as TOML text.
        toml: config.toml as it stands.
        notes: what is missing or was left out, a sentence each.
        peak_flops: BF16 FLOP/s of one rank that MFU is counted against, NaN if not recorded; see `_same_peak`.
    """

    name: str
    folder: Path
    train: list[Record]
    evals: dict[str, list[Record]]
    fp8: list[Record]
    events: list[Record]
    facts: Record
    config: Record
    changed: dict[str, tuple[str, str]]
    toml: str
    notes: list[str] = field(default_factory=list)
    peak_flops: float = float("nan")

    def series(self, key: str) -> np.ndarray:
        """A field of all training records, float64 [num records]; NaN where a record lacks it."""
        return np.array([_number(record.get(key)) for record in self.train])

    def mfu(self, key: str) -> np.ndarray:
        """`mfu_causal` or `mfu_full` of all training records in %, against `peak_flops`."""
        return 100.0 * self.series(key) * (_number(self.facts.get("peak_flops")) / self.peak_flops)

    @property
    def steps(self) -> np.ndarray:
        """The step of each training record, int64 [num records]."""
        return np.array([record["step"] for record in self.train], dtype=np.int64)

    @property
    def precision(self) -> str:
        """What the GEMMs computed in, for a reader: `FP8 delayed`, `BF16`."""
        section = self.config.get("precision", {})
        recipe = str(section.get("recipe", "none"))
        return str(section.get("dtype", "bf16")).upper() if recipe == "none" else _LABELS.get(recipe, f"FP8 {recipe}")

    @property
    def is_quantized(self) -> bool:
        """Whether the linears compute in eight bits or fewer."""
        return str(self.config.get("precision", {}).get("recipe", "none")) != "none"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def read_runs(folders: list[Path]) -> list[Run]:
    """Read several run folders and give them names that differ.

    Raises:
        DataError: see `read_run`, or the same folder twice.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise DataError(f"{', '.join(map(str, folders))}: the same run folder twice; name each once")
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    runs = [run if names.count(run.name) == 1 else replace(run, name=f"{run.name} ({run.folder})") for run in runs]
    return [replace(run, peak_flops=_same_peak(run, runs)) for run in runs]


def _same_peak(run: Run, runs: list[Run]) -> float:
    """The peak of a run; of measured ones on the same machine the highest, for a peak is what it reached once.

    Other work on a machine makes a measurement too low, and with it the MFU of that run too high against the others.
    """
    if not str(run.facts.get("peak_source", "")).startswith("measured"):
        return _number(run.facts.get("peak_flops"))
    keys = ("device", "cpu", "threads", "peak_source")
    machine = [run.facts.get(key) for key in keys]
    return max(_number(r.facts.get("peak_flops")) for r in runs if [r.facts.get(key) for key in keys] == machine)


def read_run(folder: Path) -> Run:
    """Read one run folder.

    Raises:
        DataError: no such folder, no run folder, no training record, a broken record or JSON file.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give a run's folder (run.dir of its TOML)")
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError(f"{folder}: no run folder, it has no metrics.jsonl; give a run's folder (run.dir of its TOML)")
    records, notes = read_records(metrics)
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record)
    train = _latest_per_step(by_kind.get("train", []))
    if not train:
        raise DataError(f"{metrics}: no training record yet; let the run take a step first")
    evals: dict[str, list[Record]] = {}
    for record in by_kind.get("eval", []):
        evals.setdefault(str(record.get("name", "valid")), []).append(record)
    facts = read_json(folder / "run.json") if (folder / "run.json").exists() else {}
    config, changed, toml = _configuration(folder / "config.toml")
    fp8 = _latest_per_step([r for r in by_kind.get("fp8", []) if isinstance(r.get("stats"), dict) and r["stats"]])
    if not evals:
        notes.append("no evaluation yet")
    if not facts:
        notes.append("no run.json: parameters, peak and environment are unknown")
    if not config:
        notes.append("no config.toml: precision and settings are unknown")
    return Run(
        name=str(facts.get("name") or folder.resolve().name),
        folder=folder,
        train=train,
        evals={name: _latest_per_step(records) for name, records in evals.items()},
        fp8=fp8,
        events=by_kind.get("event", []),
        facts=facts,
        config=config,
        changed=changed,
        toml=toml,
        notes=notes,
    )


def read_records(path: Path) -> tuple[list[Record], list[str]]:
    """The records of a metrics file, and notes on what was left out.

    Raises:
        DataError: a line before the last is not a record; the file is empty or unreadable.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    whole, rest = lines[:-1], lines[-1]
    if not whole:
        raise DataError(f"{path}: empty; let the run take a step first")
    records = [_record(path, number, line) for number, line in enumerate(whole, 1) if line.strip()]
    notes = ["the last line of metrics.jsonl was cut short and is left out"] if rest.strip() else []
    return records, notes


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        raise DataError(f"{path}:{number}: not JSON; the file was damaged, remove this line to go on") from None
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int)):
        raise DataError(f'{path}:{number}: no record of a run ("kind" and an integer "step"); remove this line')
    needed = "loss" if record["kind"] in ("train", "eval") else "step"
    if not isinstance(record.get(needed), (int, float)):
        raise DataError(f'{path}:{number}: a {record["kind"]} record without a number "{needed}"; remove this line')
    return record


def _latest_per_step(records: list[Record]) -> list[Record]:
    """A resumed run may have done a step twice; its last attempt is the one that counts."""
    return [record for _, record in sorted({record["step"]: record for record in records}.items())]


def _configuration(path: Path) -> tuple[Record, dict[str, tuple[str, str]], str]:
    if not path.exists():
        return {}, {}, ""
    try:
        return load_toml(path), changed_keys(text := path.read_text(encoding="utf-8")), text
    except ConfigError as error:
        raise DataError(str(error)) from error


def changed_keys(toml: str) -> dict[str, tuple[str, str]]:
    """Dotted key -> (default, value) of the lines that `dump_toml(comments=True)` marked as not the default."""
    found, section = {}, ""
    for line in toml.splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        elif "  # default: " in line:
            setting, _, default = line.rpartition("  # default: ")
            key, _, value = setting.partition(" = ")
            found[section + key] = (default, value)
    return found
