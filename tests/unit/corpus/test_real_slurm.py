"""The Slurm executor on a real Slurm: four nodes on this machine, as root, with Debian's packages.

`apt-get install --no-install-recommends slurmctld slurmd slurm-client munge`; the daemons are started here, with keys,
ports and folders of their own, and ended by their process ids.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megafp8.corpus import stage_run
from megafp8.corpus.run import preprocess
from tests.unit.corpus.conftest import SHARDS as LARGER
from tests.unit.corpus.conftest import everything

NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed"),
    pytest.mark.skipif(os.getuid() != 0, reason="munged and slurmd are started as root"),
]
ROOT = Path(__file__).parents[3]
NODES = ("n1", "n2", "n3", "n4")
SHARDS = {"shard_bytes": 12_000, "part_bytes": 8_000}
CONF = """ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={S}/run/munge.socket
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={S}/state
SlurmdSpoolDir={S}/spool/%n
SlurmctldPidFile={S}/run/slurmctld.pid
SlurmdPidFile={S}/run/slurmd-%n.pid
SlurmctldLogFile={S}/log/slurmctld.log
SlurmdLogFile={S}/log/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
SchedulerType=sched/backfill
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PartitionName=cpu Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Four nodes; every daemon can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("etc", "state", "log", "run", "munge", *(f"spool/{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)
        key = folder / "munge" / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (folder / "run").chmod(0o711)
        ports = free_ports(5)
        host = socket.gethostname()
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:])
        ]
        self.conf = folder / "etc" / "slurm.conf"
        *head, partition = CONF.format(host=host, S=folder, port=ports[0]).splitlines()
        self.conf.write_text("\n".join([*head, *lines, partition]) + "\n")

    def start(self) -> None:
        place = self.folder
        self.call(
            "munged", "--force", f"--key-file={place}/munge/munge.key", f"--socket={place}/run/munge.socket",
            f"--pid-file={place}/run/munged.pid", f"--log-file={place}/log/munged.log",
            f"--seed-file={place}/munge/seed",
        )  # fmt: skip
        self.start_controller()
        time.sleep(1)
        for node in NODES:
            self.start_node(node)
        self.wait_for(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "4")

    def start_controller(self) -> None:
        self.call("slurmctld", "-f", str(self.conf))

    def start_node(self, node: str) -> None:
        self.call("slurmd", "-N", node, "-f", str(self.conf))

    def kill(self, daemon: str) -> None:
        os.kill(int((self.folder / "run" / f"{daemon}.pid").read_text()), signal.SIGKILL)

    def call(self, *words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, timeout=30)

    def ask(self, *words: str) -> str:
        return subprocess.run(words, check=False, capture_output=True, text=True, timeout=30).stdout

    def wait_for(self, true: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, (self.folder / "log" / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.5)

    def stop(self) -> None:
        for path in sorted((self.folder / "run").glob("*.pid"), key=lambda path: "slurmd-" not in path.name):
            try:
                os.kill(int(path.read_text()), signal.SIGTERM)
            except (ProcessLookupError, ValueError):
                continue


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    made = Slurm(Path(tmp_path_factory.mktemp("slurm")))
    for folder in (made.folder, *made.folder.parents):  # munged refuses a path that others cannot pass
        if folder.owner() == "root" and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    monkeypatch.setenv("SLURM_CONF", str(made.conf))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def executor(**more: Any) -> dict[str, Any]:
    return {
        **SHARDS,
        "kind": "slurm",
        "poll_seconds": 0.5,
        "lease_seconds": 4.0,
        "options": ["--partition=cpu"],
        **more,
    }


def at_task(monkeypatch: pytest.MonkeyPatch, number: int, do: Callable[[], None]) -> list[str]:
    """Call something when so many tasks are done, in a thread."""
    done, seen = stage_run._Listener.done, []

    def counted(self: Any, task: Any, record: Any) -> None:
        seen.append(task.id)
        if len(seen) == number:
            threading.Thread(target=do).start()
        done(self, task, record)

    monkeypatch.setattr(stage_run._Listener, "done", counted)
    return seen


def test_same_bytes_and_nothing_left_in_the_queue(
    config: Callable, contents: Callable, tmp_path: Path, slurm: Slurm
) -> None:
    preprocess(config("whole", executor=SHARDS))
    preprocess(config(output={"workers": 4}, executor=executor()))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    slurm.wait_for(lambda: not slurm.ask("squeue", "-h").strip())


def test_every_step_with_1_2_5_workers(
    config: Callable, contents: Callable, tmp_path: Path, slurm: Slurm, mixed: Path
) -> None:
    preprocess(everything(config, tmp_path, mixed, "whole", 1))
    for workers in (1, 2, 5):
        preprocess(everything(config, tmp_path, mixed, f"w{workers}", workers, **{**executor(), **LARGER}))
        assert contents(tmp_path / f"w{workers}") == contents(tmp_path / "whole"), workers


def test_dead_node_and_dead_controller(
    config: Callable, contents: Callable, tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of two nodes' daemons and of the controller while the array works; all three come back later."""
    preprocess(config("whole", executor=SHARDS))

    def break_things() -> None:
        for daemon in ("slurmd-n1", "slurmd-n2", "slurmctld"):
            slurm.kill(daemon)
        time.sleep(3)
        slurm.start_controller()
        time.sleep(1)
        slurm.start_node("n1")
        slurm.start_node("n2")

    seen = at_task(monkeypatch, 4, break_things)
    preprocess(config(output={"workers": 4}, executor=executor(retries=5)))
    assert len(seen) > 4 and contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_option_that_the_cluster_refuses(config: Callable, slurm: Slurm) -> None:
    from megafp8.core.errors import ResourceError

    with pytest.raises(ResourceError, match="sbatch refuses: .*partition") as caught:
        preprocess(config(executor=executor(options=["--partition=gpus"])))
    assert "\n" not in str(caught.value)
