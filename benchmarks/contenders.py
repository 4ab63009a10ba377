"""Contenders: groups of processes that take a step when asked, so that several can take turns on one machine.

Memory and CPU time are measured inside each process. What else the machine does hits all contenders alike, because
they step one after the other, round by round.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megafp8.train.local_ranks import free_port

ROOT = Path(__file__).resolve().parents[1]


def serve(build: Callable[[], Callable[[], float]]) -> None:
    """Child: build, take two steps to warm up, then one for every line on stdin; answers are JSON lines on stdout."""
    start = time.perf_counter()
    step = build()
    step()
    _answer(first_step_seconds=time.perf_counter() - start)
    step()
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        _answer(seconds=seconds, cpu_seconds=cpu_seconds, loss=loss, peak_bytes=peak)


def _answer(**values: float) -> None:
    print(json.dumps(values), flush=True)


class Contender:
    """The processes of one contender; each is `python -m *words` with the environment of a rank."""

    def __init__(self, words: Sequence[str], *, ranks: int, threads: int) -> None:
        # passive waiting: idle threads of one contender must not take the cores of another
        shared = {
            "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "TRANSFORMERS_VERBOSITY": "error",
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        self._words = words
        self._processes = [
            self._start({**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(ranks)
        ]
        self.first_step_seconds = max(answer["first_step_seconds"] for answer in self._answers())
        self.steps: list[dict[str, float]] = []

    def _start(self, env: Mapping[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", *self._words]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)

    def step(self) -> None:
        """One step of all ranks: the slowest rank's wall clock, everybody's CPU time and memory."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = self._answers()
        self.steps.append(
            {
                "seconds": max(a["seconds"] for a in answers),
                "cpu_seconds": sum(a["cpu_seconds"] for a in answers),
                "peak_bytes": sum(a["peak_bytes"] for a in answers),
                "loss": answers[-1]["loss"],
            }
        )

    def _answers(self) -> list[dict[str, float]]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                how = f"with exit code {process.wait()}"
                if process.returncode == -signal.SIGKILL:
                    how = "killed, most likely out of memory: all contenders are there at once, run fewer with --only"
                raise SystemExit(f"a contender stopped {how}: {' '.join(self._words)}")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        """Let the processes end."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(timeout=60)


def take_turns(contenders: Mapping[str, Contender], rounds: int) -> None:
    """`rounds` steps of each, in turn; then let them end."""
    for _ in range(rounds):
        for contender in contenders.values():
            contender.step()
    for contender in contenders.values():
        contender.close()


def summary(contender: Contender, base: Contender | None, *, tokens: int) -> dict[str, Any]:
    """Medians over the rounds; ratios to `base` are medians of the ratios of a round."""
    seconds = statistics.median(s["seconds"] for s in contender.steps)
    cpu_seconds = statistics.median(s["cpu_seconds"] for s in contender.steps)
    values = {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "cpu_seconds": cpu_seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
        "peak_bytes": contender.steps[-1]["peak_bytes"],
        "first_step_seconds": contender.first_step_seconds,
        "loss": contender.steps[-1]["loss"],
    }
    for key in ("seconds", "cpu_seconds"):
        if base is not None:
            ratios = [b[key] / s[key] for b, s in zip(base.steps, contender.steps, strict=True)]
            values[f"speedup_{key}"] = statistics.median(ratios)
    return values
