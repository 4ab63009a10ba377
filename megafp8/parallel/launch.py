"""How a process learns its rank and joins the others: torchrun's or Slurm's variables, given as a mapping.

The environment itself is read by the caller, once.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megafp8.core.errors import ConfigError, ResourceError

# Below Linux's ephemeral ports (32768 up), above the registered services that clusters commonly run.
_FIRST_PORT, _NUM_PORTS = 20000, 10000


@dataclass(frozen=True)
class LaunchInfo:
    """What the launcher says: global rank, number of processes, rank on this node, and where to meet.

    `job`, `restarts`: torchrun's name of the job, and how often it has started the ranks again. `hosted`: the place to
    meet is torchrun's own and outlives the ranks.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500
    job: str = ""
    restarts: int = 0
    hosted: bool = False


def read_launch(env: Mapping[str, str]) -> LaunchInfo:
    """Read torchrun's variables, else those of a Slurm step (srun), else: one process.

    A Slurm batch script that did not use srun is one process, though SLURM_NTASKS may say more.

    Raises:
        ConfigError: a variable is missing or not a number, or the rank is not below the world size.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        names: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        if missing:
            raise ConfigError(f"{', '.join(missing)} not set beside RANK or WORLD_SIZE; start with torchrun")
        address, port = env["MASTER_ADDR"], _integer(env, "MASTER_PORT")
    elif env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        address = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", ""))
        free = _FIRST_PORT + _integer(env, "SLURM_JOB_ID") % _NUM_PORTS
        port = _integer(env, "MASTER_PORT") if env.get("MASTER_PORT") else free
    else:
        return LaunchInfo()
    rank, world, local_rank = (_integer(env, name) for name in names)
    if not 0 <= rank < world:
        raise ConfigError(f"{names[0]} = {rank} is not in 0..{world - 1}, as {names[1]} = {world} asks")
    restarts = _integer(env, "TORCHELASTIC_RESTART_COUNT") if env.get("TORCHELASTIC_RESTART_COUNT") else 0
    hosted = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return LaunchInfo(rank, world, local_rank, address, port, env.get("TORCHELASTIC_RUN_ID", ""), restarts, hosted)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: "dgx[003-008,011],x1" -> "dgx003".

    Raises:
        ConfigError: the list is empty or of an unknown form.
    """
    match = re.match(r"([^,\[\]]+)(?:\[(\w+)[^\]]*\]([^,\[\]]*))?", nodelist)
    if not match:
        raise ConfigError(f"SLURM_STEP_NODELIST = {nodelist!r} names no host; set MASTER_ADDR to rank 0's")
    return match[1] + (match[2] or "") + (match[3] or "")


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env.get(name, ""))
    except ValueError:
        raise ConfigError(f"{name} = {env.get(name)!r} is no number; start with torchrun or srun") from None


def init_distributed(
    device: str, env: Mapping[str, str], *, timeout_seconds: int = 600, meet_seconds: int = 600
) -> LaunchInfo:
    """Join the other processes that `env` tells of; nothing is done if there are none.

    On CUDA, tensors travel by NCCL and what lies in host memory by gloo.

    Args:
        timeout_seconds: after which a collective gives a silent rank up.
        meet_seconds: after which ranks give up those that have not come.

    Raises:
        ConfigError: as `read_launch`, or more local ranks than GPUs.
        ResourceError: the ranks do not meet; names the address.
    """
    info = read_launch(env)
    on_gpu = device.startswith("cuda")
    if on_gpu:
        if info.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {info.local_rank} has no GPU: {torch.cuda.device_count()} visible; "
                "start as many processes a node as it has GPUs"
            )
        torch.cuda.set_device(info.local_rank)
    if info.world > 1:
        _meet(info, "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timedelta(seconds=timeout_seconds), meet_seconds)
    return info


def _meet(info: LaunchInfo, backend: str, timeout: timedelta, meet_seconds: int) -> None:
    place = f"{info.address}:{info.port}"
    try:
        store: dist.Store = dist.TCPStore(
            info.address,
            info.port,
            is_master=info.rank == 0 and not info.hosted,
            timeout=timedelta(seconds=meet_seconds),
            wait_for_workers=False,
            master_listen_fd=_loopback_handle(info),
        )
        # what ranks of an attempt before left there would send these to addresses where nobody is
        store = dist.PrefixStore(f"megafp8/{info.restarts}", store)
        _wait_for_all(store, info, timedelta(seconds=meet_seconds))
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world, timeout=timeout)
    except (dist.DistError, RuntimeError, OSError) as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in text or "ddress already in use" in text:
            why, way_out = "the port is in use", "set MASTER_PORT to a free one"
        elif "onnection refused" not in text and ("imed out" in text or "timeout" in text):
            why = f"nobody answered within {meet_seconds} s"
            way_out = "look whether rank 0 runs there, and at MASTER_ADDR and MASTER_PORT"
        else:
            why, way_out = text, "look at MASTER_ADDR and MASTER_PORT, and whether rank 0 runs there"
        raise ResourceError(f"no meeting of the ranks at {place}: {why}; {way_out}") from error


def _wait_for_all(store: dist.Store, info: LaunchInfo, patience: timedelta) -> None:
    """Wait until every rank is there; who is not is named."""
    store.set(f"here/{info.rank}", "")
    if store.add("count", 1) == info.world:
        store.set("all", "")
    try:
        store.wait(["all"], patience)
    except (dist.DistStoreError, RuntimeError) as error:
        if "imed out" not in str(error) and "timeout" not in str(error):
            raise
        missing = [str(rank) for rank in range(info.world) if not store.check([f"here/{rank}"])]
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ResourceError(
            f"no meeting of the ranks at {info.address}:{info.port}: of {info.world}, rank {', '.join(missing[:8])}"
            f"{more} did not come within {patience.total_seconds():.0f} s; look at their logs, and at MASTER_ADDR, "
            "MASTER_PORT and WORLD_SIZE of all"
        ) from error


def _loopback_handle(info: LaunchInfo) -> int | None:
    """What rank 0 of ranks on one machine listens on: torch's own would listen on every interface, without a password.

    None: the store listens as torch does, or this rank has no store.
    """
    if info.rank or info.hosted or info.address not in ("127.0.0.1", "localhost"):
        return None
    return socket.create_server((info.address, info.port), backlog=info.world).detach()  # the store closes it


def shutdown() -> None:
    """Leave the other processes; harmless if there are none."""
    if dist.is_initialized():
        dist.destroy_process_group()
