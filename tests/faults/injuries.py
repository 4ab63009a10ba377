"""What is done to a run from outside: its processes by rank, its files, orders while it is on."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import psutil

from megafp8.core import faults
from tests.journeys.runs import environment


def switched_on(folder: Path, orders: str = "") -> dict[str, str]:
    """The environment of a run whose faults are noted in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return environment() | {faults.SWITCH: orders, faults.FOLDER: str(folder)}


def arm(folder: Path, orders: str) -> None:
    """Order faults while the run is on, as a whole or not at all."""
    faults.parse(orders)
    armed = folder / "armed"
    text = armed.read_text() if armed.exists() else ""
    new = folder / "armed.new"
    new.write_text(f"{text}{orders}\n")
    os.replace(new, armed)


def fired(folder: Path, order: str) -> bool:
    """Whether a process has carried it out."""
    return (folder / order.replace("*", "any")).exists()


def keepers(launcher: int) -> dict[int, psutil.Process]:
    """The keepers of a launcher's ranks."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.Error):
                if (rank := child.environ().get("RANK")) is not None:
                    found[int(rank)] = child
    return found


def trainers(launcher: int) -> dict[int, psutil.Process]:
    """The processes that train, by rank."""
    found = {}
    for rank, keeper in keepers(launcher).items():
        with contextlib.suppress(psutil.Error):
            for child in keeper.children():
                found[rank] = child
    return found


def writers(launcher: int) -> dict[int, psutil.Process]:
    """The processes that write checkpoints beside them."""
    found = {}
    for rank, trainer in trainers(launcher).items():
        with contextlib.suppress(psutil.Error):
            for child in trainer.children():
                if "megafp8.checkpoint.background" in child.cmdline():
                    found[rank] = child
    return found


def flip_bit(path: Path, rng: random.Random) -> str:
    """Flip one bit of a file in place; says which."""
    place = rng.randrange(path.stat().st_size * 8)
    with open(path, "r+b") as file:
        file.seek(place // 8)
        byte = file.read(1)[0] ^ (1 << (place % 8))
        file.seek(place // 8)
        file.write(bytes([byte]))
    return f"bit {place % 8} of byte {place // 8} of {path.name}"


def processes_of(word: str) -> list[psutil.Process]:
    """Processes whose command line names `word`; not us and what we run in."""
    ours, found = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}, []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in ours and any(word in part for part in process.cmdline()):
                found.append(process)
    return found


def listening_ports(pids: set[int] | None = None) -> set[int]:
    """TCP ports of this machine that someone listens on; of `pids` alone if given."""
    return {
        connection.laddr.port
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and (pids is None or connection.pid in pids)
    }
