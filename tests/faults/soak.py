"""The chaos run: faults at random moments of one run on four processes, then the same run without any, and a table.

    python -m tests.faults.soak --minutes 15 --seed 1

Faults come with exponential gaps of `--mtbf` seconds and are drawn from F01 (kill -9 of a rank), F08 (kill -9 of the
process that writes checkpoints), F11 (SIGTERM), F13 (SIGSTOP), F17 (disk full during a save), F21 (a bit of the newest
checkpoint flips while the run is down) and F26 (a loss that is NaN on the last rank). Nobody mends anything: the run
starts itself again after a fault, and whoever told it to stop starts the same command. Ends with 0 if every line holds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint import latest, load_tensors
from megafp8.checkpoint.folders import candidates
from tests.faults import injuries
from tests.faults.outcome import compare_samples, curve, last_step
from tests.journeys.runs import overrides, write_config, write_corpus

WORLD = 4
SETTINGS: dict[str, Any] = {
    "model__num_layers": 4, "train__global_batch": 16, "train__micro_batch": 2, "train__eval_interval": 0,
    "train__deterministic": "true", "train__timeout_seconds": 5, "optimizer__schedule": "constant",
    "optimizer__lr": "1e-4", "optimizer__min_lr": "0", "precision__dtype": "fp32", "guard__save_timeout_seconds": 20,
    "guard__setup_timeout_seconds": 90, "guard__rerun_suspicious": "true", "checkpoint__interval": 25,
    "checkpoint__asynchronous": "true", "checkpoint__keep_last": 3, "checkpoint__max_failed_saves": 5,
    "log__interval": 100,
}  # fmt: skip
KINDS = ("F01", "F08", "F11", "F13", "F17", "F21", "F26")


class Soak:
    """One run under faults: `start` its command whenever it has ended, `injure` it now and then."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder, self.run, self.orders = folder, folder / "run", folder / "orders"
        self.config = write_config(folder, folder / "data")
        self.log = open(folder / "console.txt", "ab")  # noqa: SIM115 - as long as the run
        self.process: subprocess.Popen[bytes] | None = None
        self.counts: Counter[str] = Counter()
        self.codes: Counter[int] = Counter()
        self.number = 0
        self.lost: dict[str, list[float]] = {}  # kind -> seconds from each fault until a step that had not been taken
        self._hit: tuple[str, float, int] | None = None  # the last fault, when, and the newest step then

    def start(self) -> None:
        """The one command, whatever happened."""
        words = [str(self.config), "--nproc", str(WORLD), "--restarts", "5"]
        words += overrides(**SETTINGS | {"train__steps": 10_000_000})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megafp8", "pretrain", *words],
            stdout=self.log, stderr=self.log, env=injuries.switched_on(self.orders),
        )  # fmt: skip

    def ended(self) -> bool:
        """Whether the command has ended; it is noted and started again."""
        if self.process is None or self.process.poll() is None:
            return False
        self.codes[self.process.returncode] += 1
        if self.process.returncode != 75:
            raise SystemExit(f"soak: exit code {self.process.returncode}, see {self.folder}/console.txt")
        return True

    def injure(self, kind: str) -> str | None:
        """Do it; says what, or None where there is nothing to do it to at this moment."""
        assert self.process is not None
        self.number += 1
        act: Callable[[], str | None] = getattr(self, f"_{kind.lower()}")
        when = time.monotonic()
        what = act()
        if what is not None:
            self.counts[kind] += 1
            self._hit = self._hit or (kind, when, last_step(self.run))  # on a run that is down: with that one
        return what

    def look(self) -> int:
        """The newest step; notes it where the run has come past its last fault."""
        step = last_step(self.run)
        if self._hit is not None and step > self._hit[2]:
            self.lost.setdefault(self._hit[0], []).append(time.monotonic() - self._hit[1])
            self._hit = None
        return step

    def _someone(self, found: dict[int, Any]) -> tuple[int, Any] | None:
        return self.rng.choice(sorted(found.items())) if found else None

    def _f01(self) -> str | None:
        if (one := self._someone(injuries.trainers(self.process.pid))) is None:
            return None
        one[1].kill()
        return f"kill -9 rank {one[0]}"

    def _f08(self) -> str | None:
        if (one := self._someone(injuries.writers(self.process.pid))) is None:
            return None
        one[1].kill()
        return f"kill -9 the writer of rank {one[0]}"

    def _f11(self) -> str | None:
        whom = self.rng.choice(("launcher", "one rank", "all ranks"))
        ranks = injuries.keepers(self.process.pid)
        if len(ranks) < WORLD:
            return None
        chosen = [self.process] if whom == "launcher" else list(ranks.values())
        for one in chosen[:1] if whom == "one rank" else chosen:
            one.send_signal(signal.SIGTERM)
        return f"SIGTERM to {whom}"

    def _f13(self) -> str | None:
        if (one := self._someone(injuries.trainers(self.process.pid))) is None:
            return None
        one[1].send_signal(signal.SIGSTOP)
        return f"SIGSTOP rank {one[0]}"

    def _f17(self) -> str | None:
        rank = self.rng.randrange(WORLD)
        injuries.arm(self.orders, f"save-piece:full:{rank}:*#{self.number}")
        return f"disk full under rank {rank}'s next save"

    def _f21(self) -> str | None:
        found = injuries.trainers(self.process.pid)
        if len(candidates(self.run / "checkpoints")) < 2 or not found:
            return None
        for one in found.values():  # all, so that none commits another one meanwhile
            one.kill()
        time.sleep(0.2)
        newest = latest(self.run / "checkpoints")
        assert newest is not None
        return injuries.flip_bit(self.rng.choice(sorted(newest.iterdir())), self.rng) + f" of {newest.name}"

    def _f26(self) -> str | None:
        injuries.arm(self.orders, f"loss:nan:{WORLD - 1}:*#{self.number}")
        return f"NaN in the loss of rank {WORLD - 1}"


class Progress:
    """A line now and then that says how far a half has come: `soak: under faults 312 of 900 s …`."""

    def __init__(self, what: str, total: float, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._begin = self._said = time.monotonic()

    def show(self, done: float, steps: int, more: str = "") -> None:
        """Print it if 15 s have passed since the last one."""
        now = time.monotonic()
        if now - self._said < 15 or not done:
            return
        self._said, left = now, (now - self._begin) * (self._total / done - 1)
        rate, to_go = steps / (now - self._begin), max(0.0, left) / 60
        here = f"{done:.0f} of {self._total:.0f} {self._unit}, step {steps}, {rate:.1f} steps a second"
        print(f"soak: {self._what}: {here}{more}, {to_go:.1f} min left", flush=True)


def chaos(soak: Soak, *, seconds: float, mtbf: float) -> float:
    """Faults until the time is up, then a stop; returns the wall time until then."""
    begin = time.monotonic()
    soak.start()
    due, progress = begin + soak.rng.expovariate(1 / mtbf), Progress("under faults", seconds, "s")
    while (now := time.monotonic()) < begin + seconds:
        time.sleep(0.2)
        if soak.ended():
            soak.start()
        step = soak.look()
        progress.show(now - begin, step, f", {sum(soak.counts.values())} faults")
        if now >= due:
            kind = soak.rng.choice(KINDS)
            what = soak.injure(kind)
            if what is not None:
                print(f"{now - begin:6.0f} s  step {step:6d}  {kind}  {what}", flush=True)
                due = time.monotonic() + soak.rng.expovariate(1 / mtbf)
            else:
                due += 1.0
    wall = time.monotonic() - begin
    end = time.monotonic() + 120
    while time.monotonic() < end:  # the last fault may still be at work
        assert soak.process is not None
        soak.process.send_signal(signal.SIGTERM)
        try:
            if soak.process.wait(60) == 75:
                break
        except subprocess.TimeoutExpired:
            continue
        if soak.process.returncode not in (75, 137, 143, 130):
            raise SystemExit(f"soak: the stop ended with exit code {soak.process.returncode}")
        soak.start()
        time.sleep(15)
    return wall


def quiet(folder: Path, steps: int) -> float:
    """The same run without a fault; returns its seconds a step, saves and all, without its start."""
    config = write_config(folder, folder.parent / "chaos/data")
    words = ["pretrain", str(config), "--nproc", str(WORLD), *overrides(**SETTINGS | {"train__steps": steps})]
    with open(folder / "console.txt", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megafp8", *words], stdout=log, stderr=log,
            env=injuries.switched_on(folder / "orders"),
        )  # fmt: skip
        times: list[tuple[float, int]] = []
        progress = Progress("without", steps, "steps")
        while process.poll() is None:
            time.sleep(0.5)
            if (step := last_step(folder / "run")) > 1:
                times.append((time.monotonic(), step))
                progress.show(step, step)
    if process.returncode or len(times) < 2:
        raise SystemExit(f"soak: the run without faults ended with exit code {process.returncode}: {folder}")
    (first, begin), (last, end) = times[0], max(times[:1] + [t for t in times if t[1] < steps], key=lambda t: t[1])
    return (last - first) / max(1, end - begin)


def main() -> int:
    """Run both, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--mtbf", type=float, default=60.0, help="seconds between faults, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="kept afterwards; default: a temporary one")
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True)
        return both(args.folder.resolve(), args)
    with tempfile.TemporaryDirectory(prefix="megafp8-soak-") as name:
        return both(Path(name), args)


def both(root: Path, args: argparse.Namespace) -> int:
    """The run under faults and the quiet one in `root`."""
    torch.set_num_threads(1)
    write_corpus(root / "chaos/data")
    shared, ports = set(os.listdir("/dev/shm")), injuries.listening_ports()
    soak = Soak(root / "chaos", args.seed)
    print(f"soak: seed {args.seed}, MTBF {args.mtbf:g} s, {args.minutes:g} minutes, {WORLD} processes", flush=True)
    wall = chaos(soak, seconds=60 * args.minutes, mtbf=args.mtbf)
    time.sleep(1.0)
    left = injuries.processes_of(str(root))
    leaks = {
        "processes": [process.pid for process in left],
        "shared memory": sorted(set(os.listdir("/dev/shm")) - shared),
        "ports": sorted(injuries.listening_ports() - ports),
    }
    steps = last_step(soak.run)
    print(f"soak: {steps} steps under faults in {wall:.0f} s; now the same steps without", flush=True)
    step_seconds = quiet(root / "quiet", steps)
    return report(root, soak, wall=wall, steps=steps, step_seconds=step_seconds, leaks=leaks)


def report(
    root: Path, soak: Soak, *, wall: float, steps: int, step_seconds: float, leaks: dict[str, list[Any]]
) -> int:
    """The table; 0 if everything holds."""
    stormy, calm = curve(soak.run), curve(root / "quiet/run")
    a, b = (latest(root / name / "run/checkpoints") for name in ("chaos", "quiet"))
    tensors = [load_tensors(path) if path else {} for path in (a, b)]
    same = tensors[0].keys() == tensors[1].keys() and all(torch.equal(tensors[0][n], t) for n, t in tensors[1].items())
    samples = compare_samples(soak.orders, root / "quiet/orders", WORLD, steps, SETTINGS["train__global_batch"])
    goodput = steps * step_seconds / wall
    own = sum(json.loads(x)["step_seconds"] for x in (soak.run / "metrics.jsonl").open() if '"kind": "train"' in x)
    lost = [f"{kind} {sum(found) / len(found):.0f}" for kind, found in sorted(soak.lost.items())]
    events = Counter(json.loads(x)["event"] for x in (soak.run / "metrics.jsonl").open() if '"kind": "event"' in x)
    by_kind = ", ".join(f"{kind} {soak.counts[kind]}" for kind in KINDS)
    again = (soak.folder / "console.txt").read_text(errors="replace").count(": starting again")
    rows = [
        ("faults", f"{by_kind}; {sum(soak.counts.values())} in all"),
        ("starts", f"1 by hand, {again} by itself after a fault, {soak.codes[75]} after it was told to stop"),
        ("seconds until a new step, mean", ", ".join(lost) or "no fault"),
        ("what the run noted", ", ".join(f"{name} {count}" for name, count in sorted(events.items()))),
        ("goodput", f"{100 * goodput:.1f} %: {steps} steps of {1000 * step_seconds:.1f} ms in {wall:.0f} s"),
        ("by the run's own clock", f"{100 * own / wall:.1f} %: those steps, saves left out, took it {own:.0f} s"),
    ]
    checks = [
        ("loss curve", stormy == calm, f"{len(stormy)} steps bit-equal to the run without faults"),
        ("weights and optimizer", same, f"{len(tensors[0])} tensors of step {steps} bit-equal"),
        ("samples", not samples, samples or f"{steps * SETTINGS['train__global_batch']} ids, each exactly once"),
        ("set aside", True, f"{len(list((soak.run / 'checkpoints').glob('*.damaged-*')))} damaged checkpoints"),
        *((f"leaked {name}", not found, str(found) if found else "none") for name, found in leaks.items()),
    ]
    print("\n| soak | |\n|---|---|")
    for name, text in rows:
        print(f"| {name} | {text} |")
    for name, holds, text in checks:
        print(f"| {name} | {'ok' if holds else 'FAILED'}: {text} |")
    return 0 if all(holds for _, holds, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
