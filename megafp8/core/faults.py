"""Faults on purpose, for tests: places in the code where one may be ordered. Without the switch they do nothing.

The switch is the environment variable MEGAFP8_FAULT, read once when a process starts: `point:action:rank:step[:value]`,
several with spaces between them; `*` stands for any rank or step. A word may end in `#name`, to tell equal ones apart.
Each fires once in a process; with MEGAFP8_FAULT_FOLDER once over all processes and attempts, a file there marks it, its
file `armed` may hold more orders while a run is on, and `trace` writes there. Each says on stderr that it was meant.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafp8.core.heartbeat import HEART

SWITCH, FOLDER = "MEGAFP8_FAULT", "MEGAFP8_FAULT_FOLDER"

POINTS = (
    "setup", "index", "load", "batch", "forward", "backward", "reduce", "optimizer", "evaluation", "exit",
    "save-begin", "save-piece", "save-written", "save-commit", "save-committed", "prune",
)  # fmt: skip
VALUES = ("loss", "gradient", "weight")  # what `spoil` is given
_SIGNALS = {
    "kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV, "abort": signal.SIGABRT,
    "term": signal.SIGTERM, "usr1": signal.SIGUSR1, "int": signal.SIGINT,
}  # fmt: skip
_REFUSALS = {"full": errno.ENOSPC, "io": errno.EIO, "quota": errno.EDQUOT, "readonly": errno.EROFS}
ACTIONS = (*_SIGNALS, *_REFUSALS, "exit", "raise", "memory", "sleep", "spin", "nan", "inf", "flip")


@dataclass(frozen=True)
class Order:
    """One fault that is to happen: where, what, on which rank in which step ("*": any), how much; `text` as given."""

    point: str
    action: str
    rank: str
    step: str
    value: str
    text: str


def parse(text: str) -> list[Order]:
    """Orders as MEGAFP8_FAULT holds them.

    Raises:
        ValueError: a word is none; it says why.
    """
    found = []
    for word in text.split():
        parts = word.partition("#")[0].split(":")
        point, action, rank, step, *value = parts if len(parts) > 3 else [""] * 4
        known = point in POINTS + VALUES and action in ACTIONS and len(value) < 2
        if not known or not all(part == "*" or part.isdigit() for part in (rank, step)):
            raise ValueError(f"{SWITCH}: {word!r} is not point:action:rank:step[:value]")
        found.append(Order(point, action, rank, step, value[0] if value else "", word))
    return found


class Injector:
    """What a process with the switch on has to do at its points."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._orders = parse(env[SWITCH])
        self._rank = env.get("RANK", env.get("SLURM_PROCID", "0"))
        self._folder = Path(env[FOLDER]) if FOLDER in env else None
        self._fired: set[str] = set()

    def due(self, point: str) -> Iterator[Order]:
        """Orders for this point, rank and step that nobody has carried out; as each is taken it counts as such."""
        orders, step = self._orders, str(HEART.last.step)
        if self._folder is not None and (armed := self._folder / "armed").exists():
            orders = orders + parse(armed.read_text())
        mine = [o for o in orders if o.point == point and o.rank in ("*", self._rank) and o.step in ("*", step)]
        return filter(self._claim, mine)

    def _claim(self, order: Order) -> bool:
        if order.text in self._fired:
            return False
        self._fired.add(order.text)
        if self._folder is not None:
            try:
                (self._folder / order.text.replace("*", "any")).touch(exist_ok=False)
            except FileExistsError:
                return False
        os.write(2, f"megafp8: fault on purpose: {order.text} on rank {self._rank}, step {HEART.last.step}\n".encode())
        return True

    def trace(self, name: str, values: Mapping[str, Any]) -> None:
        """Append a line to this rank's file of that name."""
        if self._folder is not None:
            record = {"pid": os.getpid(), "step": HEART.last.step, **values}
            with open(self._folder / f"{name}-{self._rank}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record, default=lambda tensor: tensor.tolist()) + "\n")


_injector = Injector(os.environ) if SWITCH in os.environ else None


def order(env: Mapping[str, str] | None) -> None:
    """Take the switch from `env` instead, within this process; None: off."""
    global _injector
    _injector = Injector(env) if env is not None else None


def at(point: str) -> None:
    """A place where a fault may be ordered.

    Raises:
        whatever the order says.
    """
    if _injector is not None:
        for found in _injector.due(point):
            _act(found)


def spoil(name: str, tensor: Any) -> None:
    """A value that an order may change in place: its first element, or with `flip` one bit of it; on the CPU."""
    if _injector is None:
        return
    if (found := next(_injector.due(name), None)) is not None:
        flat = tensor.detach().reshape(-1)
        assert flat.data_ptr() == tensor.data_ptr(), f"{name} is not contiguous"
        if found.action == "flip":
            memoryview(flat.numpy()).cast("B")[int(found.value or 0) // 8] ^= 1 << (int(found.value or 0) % 8)
        else:
            flat[0] = float(found.action)


def trace(name: str, **values: Any) -> None:
    """Note what the tests want to know; with MEGAFP8_FAULT_FOLDER only."""
    if _injector is not None:
        _injector.trace(name, values)


def _act(found: Order) -> None:
    if found.action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[found.action])
    elif found.action in _REFUSALS:
        number = _REFUSALS[found.action]
        raise OSError(number, os.strerror(number))
    elif found.action == "exit":
        os._exit(int(found.value or 0))
    elif found.action == "memory":
        raise MemoryError(found.text)
    elif found.action == "sleep":
        time.sleep(float(found.value))
    elif found.action == "spin":  # backtracks for ever and never gives the interpreter up
        re.match(r"(a*)*b", "a" * 64)
    else:
        raise RuntimeError(found.text)
