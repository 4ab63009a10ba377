"""The order of `tests/gpu/run.sh`: parts as processes of their own, each with a budget, one JSON of all figures.

A part that crashes, hangs or runs out of memory takes nothing else with it. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import machine
from tests.gpu.summary import against_bf16, comparison_lines, summary_lines

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "tests" / "gpu" / "launch.py"
STAND_IN = ROOT / "tests" / "gpu" / "stand_in"
GRACE = 15.0  # seconds a part may overrun its budget before it is killed
OWN_SECONDS = 20.0  # of the whole budget: the machine's description, this process's own work


@dataclass(frozen=True)
class Part:
    """One process: its module, its budget in seconds, and the least it is started with."""

    name: str
    module: str
    seconds: float
    least: float
    arguments: tuple[str, ...] = ()


@dataclass
class Session:
    """One call of the script."""

    out: Path
    end: float
    only: tuple[str, ...] = ()
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, part: Part) -> dict[str, Any]:
        """Run one part, or say why not."""
        left = self.end - time.monotonic() - GRACE
        wanted = not self.only or any(part.name.startswith(name) for name in self.only)
        if not wanted:
            return self.skip(part.name, "not among --only")
        if left < part.least:
            return self.skip(part.name, f"{max(0, left):.0f} s of the budget are left, it needs {part.least:.0f} s")
        figures = self.out / f"{part.name.replace(' ', '-')}.json"
        log = figures.with_suffix(".log")
        seconds = min(part.seconds, left)
        print(f"-- {part.name} (at most {seconds:.0f} s)", flush=True)
        started = time.monotonic()
        code, ended = _run(part, figures, log, seconds)
        found = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
        if code != 0 or "status" not in found:
            found["status"] = "error"
            found["reason"] = f"{ended}; {log}: {_last_line(log)}"
        found["seconds"] = round(time.monotonic() - started, 1)
        self.results[part.name] = found
        print("\n".join(f"   {line}" for line in summary_lines(part.name, found)), flush=True)
        return found

    def skip(self, name: str, reason: str) -> dict[str, Any]:
        """Record that a part does not run."""
        print(f"-- {name}: skipped, {reason}", flush=True)
        self.results[name] = {"status": "skipped", "reason": reason}
        return self.results[name]


def _run(part: Part, figures: Path, log: Path, seconds: float) -> tuple[int, str]:
    figures.unlink(missing_ok=True)
    command = [sys.executable, str(LAUNCH), part.module, "--out", str(figures), "--seconds", f"{seconds:.0f}"]
    with open(log, "w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                [*command, *part.arguments], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds + GRACE
            )
        except subprocess.TimeoutExpired:
            return 124, f"killed {GRACE:.0f} s after its budget of {seconds:.0f} s"
    return done.returncode, f"ended with code {done.returncode}"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "(empty)"


def main(words: list[str] | None = None) -> int:
    """Run all parts; the exit code of the script."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description="FP8 on this machine: right, and how fast.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of gpu.json and the logs")
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything")
    parser.add_argument("--only", action="append", default=[], help="parts whose name begins so; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a GPU too")
    args = parser.parse_args(words)
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    facts = machine.describe()
    print("\n".join(machine.lines(facts)), flush=True)
    if facts["missing"]:
        print(f"nothing can run: {facts['missing']}", file=sys.stderr)
        return 2
    if facts["stand_ins"]:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    dry = not facts["gpus"]
    session = Session(args.out.resolve(), started + args.budget - OWN_SECONDS, tuple(args.only))
    _all_parts(session, tiny=dry or args.tiny, on_gpu=not dry, te=not facts["transformer_engine"].startswith("not"))
    failed = [name for name, found in session.results.items() if found["status"] in ("failed", "error")]
    code = 1 if failed else 0
    figures = {
        "mode": "dry run: no GPU was measured" if dry else "tiny, on a GPU" if args.tiny else "measured on a GPU",
        "machine": facts,
        "budget_seconds": args.budget,
        "seconds": round(time.monotonic() - started, 1),
        "exit_code": code,
        "failed": failed,
        "against_bf16": against_bf16(session.results),
        "parts": session.results,
    }
    target = args.out / "gpu.json"
    target.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    _print_end(figures, target)
    return code


def _print_end(figures: dict[str, Any], target: Path) -> None:
    counts = [found["status"] for found in figures["parts"].values()]
    said = ", ".join(f"{counts.count(s)} {s}" for s in ("passed", "failed", "error", "skipped") if s in counts)
    print(f"== {said} in {figures['seconds']:.0f} s; {figures['mode']}; all figures in {target}")
    print("".join(f"   {line}\n" for line in comparison_lines(figures["against_bf16"])), end="")
    for name in figures["failed"]:
        found = figures["parts"][name]
        print(f"   {name}: {found['status']}: {found.get('reason', 'see its checks')}")


def _all_parts(session: Session, *, tiny: bool, on_gpu: bool, te: bool) -> None:
    size = ("--tiny",) if tiny else ()
    _correctness(session, "native", 110, size)
    if te:
        _correctness(session, "te", 60, size)
    else:
        session.skip("correctness te", "Transformer Engine does not import here")
    session.run(Part("speed of a linear", "tests.gpu.speed", 50, 15, size))
    first = session.run(_training("none", "none", 130, size))
    batch = ("--micro-batch", str(first["micro_batch"])) if "micro_batch" in first else ()
    # the mission's recipe first; then the others in the order in which their hardware came
    for recipe, backend in _trainings(on_gpu, te):
        session.run(_training(recipe, backend, 90 if recipe == "delayed" else 65, (*size, *batch)))


def _trainings(on_gpu: bool, te: bool) -> Iterable[tuple[str, str]]:
    yield "delayed", "native"
    if te:
        yield "delayed", "te"
    if on_gpu:
        yield from ((recipe, "native") for recipe in ("current", "blockwise", "mxfp8", "nvfp4"))
    else:  # the dry run tries the path, not the recipes: the unit tests do that
        yield "delayed", "auto"


def _training(recipe: str, backend: str, seconds: float, more: tuple[str, ...]) -> Part:
    name = "train bf16" if recipe == "none" else f"train {recipe} {backend}"
    return Part(name, "tests.gpu.training", seconds, 25, ("--recipe", recipe, "--backend", backend, *more))


def _correctness(session: Session, backend: str, seconds: float, size: tuple[str, ...]) -> None:
    """All recipes in one process; a recipe that kills it is named, and the rest go on in another."""
    done: dict[str, Any] = {}
    end = time.monotonic() + seconds
    name = f"correctness {backend}"
    while True:
        skip = ("--without", ",".join(done)) if done else ()
        arguments = ("--backend", backend, *size, *skip)
        found = session.run(Part(name, "tests.gpu.correctness", end - time.monotonic(), 10, arguments))
        cases = found.get("recipes", {})
        killed = [case for case, result in cases.items() if result["status"] == "running"]
        for case in killed:
            cases[case] = {"status": "error", "reason": found["reason"]}
        done |= cases
        if not killed or end - time.monotonic() < 10:
            break
    if done:
        statuses = [result["status"] for result in done.values()]
        worst = next((s for s in ("error", "failed") if s in statuses), found["status"])
        session.results[name] = found | {"recipes": done, "status": worst}


if __name__ == "__main__":
    sys.exit(main())
