"""F36, F39, F40: ranks that do not find each other or each other's disk, and a network that goes away."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megafp8 import checkpoint
from megafp8.core.errors import MegaError, ResourceError
from megafp8.parallel.launch import init_distributed, shutdown
from megafp8.parallel.mesh import build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.train.local_ranks import free_port
from tests.distributed.ranks import run_ranks
from tests.faults.attempts import forks
from tests.journeys.runs import environment, overrides, records, write_config


def _meets(address: str, port: int, rank: int = 0, world: int = 2) -> str:
    env = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "MASTER_ADDR": address,
           "MASTER_PORT": str(port)}  # fmt: skip
    try:
        init_distributed("cpu", env, timeout_seconds=30, meet_seconds=2)
    except ResourceError as error:
        return str(error)
    finally:
        shutdown()
    return "met"


def test_a_place_to_meet_that_is_wrong_is_named_in_time():
    """F40: the port in use, nobody there, a rank that does not come."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begin = time.monotonic()
        said = _meets("127.0.0.1", port)
        assert f"127.0.0.1:{port}" in said and "in use" in said and "MASTER_PORT" in said
    port = free_port()
    said = _meets("127.0.0.1", port, rank=1)
    assert f"no meeting of the ranks at 127.0.0.1:{port}" in said and "MASTER_ADDR" in said
    said = _meets("127.0.0.1", port)
    assert "of 2, rank 1 did not come within 2 s" in said
    assert time.monotonic() - begin < 30


def _apart(rank: int, world: int, folder: str) -> str:
    """Each rank has a folder of its own where one is meant."""
    mesh = build_mesh(ParallelConfig(), world)
    root = Path(folder) / f"node{rank}" / "checkpoints"
    root.mkdir(parents=True)
    try:
        checkpoint.save(root, 1, {f"own{rank}": torch.ones(9)}, {}, mesh, {"step": 1})
    except MegaError as error:
        return str(error)
    return "saved"


def test_nodes_without_a_disk_in_common_are_told_so(tmp_path):
    """F36."""
    for said in run_ranks(_apart, 2, str(tmp_path)):
        assert "not seen by every rank; put checkpoints on a file system shared by all" in said and "\n" not in said
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@contextlib.contextmanager
def two_hosts(name: str):
    """Two network namespaces with a cable between them; skipped where that may not be."""
    ends = [f"{name}{number}" for number in (0, 1)]
    try:
        for end in ends:
            if subprocess.run(["ip", "netns", "add", end], check=False, capture_output=True).returncode:
                pytest.skip("this container may not make network namespaces")
        subprocess.run(["ip", "link", "add", ends[0], "netns", ends[0], "type", "veth", "peer", "name", ends[1],
                        "netns", ends[1]], check=True)  # fmt: skip
        for number, end in enumerate(ends):
            for words in (["addr", "add", f"10.77.0.{number + 1}/24", "dev", end], ["link", "set", end, "up"],
                          ["link", "set", "lo", "up"]):  # fmt: skip
                subprocess.run(["ip", "-n", end, *words], check=True)
        yield ends
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "del", end], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("ip"), reason="only root makes network namespaces")
@pytest.mark.parametrize("cut", ["5 s", "for ever", "one direction"])
@forks
def test_a_cut_network(data, tmp_path, cut):
    """F39: a short cut is survived; a long one ends both sides within the time-out and 35 s, and names it."""
    config = write_config(tmp_path, data)
    words = overrides(train__steps=100_000, train__eval_interval=0, log__interval=1000, train__timeout_seconds=12,
                      guard__save_timeout_seconds=12)  # the cut may fall into a save, too
    with two_hosts("mfp8") as ends:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", end, sys.executable, "-m", "megafp8", "pretrain", str(config), *words],
                stderr=subprocess.PIPE, text=True,
                env=environment() | {
                    "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.77.0.1",
                    "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": end,
                },
            )
            for rank, end in enumerate(ends)
        ]  # fmt: skip
        try:
            end = time.monotonic() + 90
            while len(records(tmp_path / "run")) < 5:
                assert time.monotonic() < end and all(p.poll() is None for p in ranks), [p.poll() for p in ranks]
                time.sleep(0.1)
            if cut == "one direction":
                command = ["ip", "netns", "exec", ends[1], "sh", "-c",
                           "ip route del 10.77.0.0/24; ip route add blackhole 10.77.0.1/32"]  # fmt: skip
                subprocess.run(command, check=True)
            else:
                subprocess.run(["ip", "-n", ends[1], "link", "set", ends[1], "down"], check=True)
            begin, count = time.monotonic(), len(records(tmp_path / "run"))
            if cut == "5 s":
                time.sleep(5)
                subprocess.run(["ip", "-n", ends[1], "link", "set", ends[1], "up"], check=True)
                while len(records(tmp_path / "run")) < count + 20:
                    assert time.monotonic() < begin + 60 and all(p.poll() is None for p in ranks)
                    time.sleep(0.1)
                return
            said = "".join(process.communicate(timeout=12 + 35)[1] for process in ranks)
            assert time.monotonic() - begin < 12 + 35 and all(p.returncode in (70, 71) for p in ranks), said
            assert "hung: all 2 ranks wait for each other" in said or "lost its peer" in said, said
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
