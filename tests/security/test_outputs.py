"""P6, P7, P8: what a run listens on, what it writes down, and who may read that; one real run for all three."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megafp8.cli.main import main
from megafp8.core.config import build
from megafp8.core.errors import ConfigError
from megafp8.core.log import redact
from megafp8.data.config import DataConfig
from tests.journeys.runs import environment, overrides, wait_for, write_config, write_corpus

CANARIES = {
    "HF_TOKEN": "hf_CanaryCanaryCanaryCanary0123456789",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdefcanary77",
    "AWS_SECRET_ACCESS_KEY": "wJalrCANARYbPxRfiCYEXAMPLEKEYcanary",
    "OPENAI_API_KEY": "sk-proj-canary0123456789canary0123456789",
    "DATABASE_PASSWORD": "canary-password-hunter2",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str], str]:
    """A finished run's folder, the addresses that its processes listened on, and all that it said."""
    folder = tmp_path_factory.mktemp("outputs")
    write_corpus(folder / "data")
    toml = write_config(folder, folder / "data")
    env = {**environment(), **CANARIES}
    more = overrides(train__steps=8, parallel__dp=2, log__tensorboard="true")
    command = [sys.executable, "-m", "megafp8", "pretrain", str(toml), "--nproc", "2", "--debug", *more]
    os.umask(0)  # the worst that a user may have
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    finally:
        os.umask(0o022)
    metrics = folder / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"step": 2' in metrics.read_text(), process, 120)
    heard = {
        connection.laddr.ip
        for one in psutil.Process(process.pid).children(recursive=True)
        for connection in one.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return folder / "run", heard, said


def test_ranks_of_one_machine_listen_on_the_loopback_only(run):
    """P6: the rendezvous and gloo's own connections."""
    assert run[1] == {"127.0.0.1"}


def test_no_secret_of_the_environment_is_written_down(run):
    """P7: over every file of the run folder, and what it printed."""
    folder, _, said = run
    texts = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(texts) > 8 and any("tfevents" in name for name in texts)
    for name, data in {**texts, "what was said": said.encode()}.items():
        for canary in CANARIES.values():
            assert canary.encode() not in data, f"{name} holds {canary}"


def test_what_a_run_writes_is_not_the_worlds(run):
    """P8, with a umask of 0 outside."""
    folder = run[0]
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert not mode & 0o027, f"{path} has mode {mode:o}"


def test_the_mask_can_be_chosen(tmp_path, monkeypatch, capsys):
    old = os.umask(0o022)
    try:
        for given, expected in (("", 0o027), ("077", 0o077), ("002", 0o002)):
            os.umask(0o022)
            monkeypatch.setenv("MEGAFP8_UMASK", given)
            assert main(["checkpoint", "ls", str(tmp_path)]) == 4
            assert os.umask(0) == expected
        monkeypatch.setenv("MEGAFP8_UMASK", "9x")
        assert main(["checkpoint", "ls", str(tmp_path)]) == 2
        assert "MEGAFP8_UMASK = '9x'" in capsys.readouterr().err
    finally:
        os.umask(old)


SECRETS = [
    "hf_CanaryCanaryCanaryCanary0123456789", "sk-proj-canary0123456789canary0123456789",
    "ghp_canary0123456789canary0123456789abcd", "AKIACANARY0123456789",
    "s3://user:hunter2@bucket/x", "https://x.example/f?X-Amz-Signature=abcdef&b=1", "https://x.example/?api_key=abc",
]  # fmt: skip


@pytest.mark.parametrize("secret", SECRETS)
def test_configurations_are_kept_so_they_may_hold_no_secret(secret):
    """P7: config.toml and a checkpoint's manifest hold the whole configuration."""
    values = {"tokenizer": secret, "train": [{"path": "a"}], "sequence_length": 8}
    with pytest.raises(ConfigError, match="tokenizer: looks like an access token") as caught:
        build(DataConfig, values)
    assert secret not in str(caught.value)
    with pytest.raises(ConfigError, match="path: looks like"):
        build(DataConfig, {**values, "tokenizer": "bytes", "train": [{"path": secret}]})


@pytest.mark.parametrize(
    "text",
    ["data/hf_models/x", "runs/task-force-on-language-models", "s3://bucket/key/of/things", "http://host:8080/x",
     "disk-experiments-with-long-names", "a@b.example", "keys?", "https://x.example/?q=1&page=2"],
)  # fmt: skip
def test_what_is_no_secret_is_left_alone(text):
    assert redact(text) == text


def test_temporary_names_cannot_be_guessed():
    """P8: hidden files beside the target, with random letters; nothing in a shared /tmp under a fixed name."""
    root = Path(__file__).parents[2] / "megafp8"
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"[\"']/tmp/", text), f"{path} names a file in /tmp"
