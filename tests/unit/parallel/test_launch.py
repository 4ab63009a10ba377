"""What torchrun's and Slurm's variables say, and what is refused."""

from __future__ import annotations

import socket

import pytest

from megafp8.core.errors import ConfigError, ResourceError
from megafp8.parallel.launch import LaunchInfo, first_host, init_distributed, read_launch, shutdown

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29400"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "dgx[003-004]",
    "SLURM_JOB_ID": "1234567",
}


def test_torchrun():
    assert read_launch(TORCHRUN) == LaunchInfo(5, 8, 1, "n0", 29400)


def test_ranks_that_do_not_come_and_a_port_in_use_are_named_with_the_address():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(ResourceError, match=rf"at 127\.0\.0\.1:{port}: the port is in use; set MASTER_PORT"):
            init_distributed("cpu", env, meet_seconds=1)
    with pytest.raises(ResourceError, match=r"of 3, rank 1, 2 did not come within 1 s"):
        init_distributed("cpu", env, meet_seconds=1)


def test_slurm_step():
    assert read_launch(SLURM) == LaunchInfo(5, 8, 1, "dgx003", 24567)
    assert read_launch({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "1"}) == LaunchInfo(5, 8, 1, "a", 1)


def test_a_batch_script_without_srun_is_one_process():
    batch = {k: v for k, v in SLURM.items() if "STEP" not in k}
    assert read_launch(batch) == read_launch({}) == LaunchInfo()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({**TORCHRUN, "RANK": "x"}, "RANK = 'x' is no number"),
        ({**TORCHRUN, "RANK": "8"}, r"RANK = 8 is not in 0\.\.7"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "set MASTER_ADDR"),
        ({**SLURM, "SLURM_LOCALID": ""}, "SLURM_LOCALID = '' is no number"),
    ],
)
def test_broken_variables(env, message):
    with pytest.raises(ConfigError, match=message):
        read_launch(env)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("dgx[003-008,011],x1", "dgx003"),
        ("a-[7,9]-ib", "a-7-ib"),
        ("r1n2,r[3-4]n1", "r1n2"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_alone_nothing_is_started():
    assert init_distributed("cpu", {}) == LaunchInfo()
    shutdown()


def test_no_gpu_for_a_local_rank():
    with pytest.raises(ConfigError, match="local rank 99 has no GPU"):
        init_distributed("cuda", {**TORCHRUN, "RANK": "99", "WORLD_SIZE": "100", "LOCAL_RANK": "99"})
