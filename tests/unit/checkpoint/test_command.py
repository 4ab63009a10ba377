"""`megafp8 checkpoint` and `megafp8 eval`: what they print, and their exit codes."""

import pytest
import torch

from megafp8 import checkpoint
from megafp8.cli.main import main
from megafp8.parallel.mesh import Mesh
from tests.unit.infer.models import config_of, save_model


@pytest.fixture
def run(tmp_path):
    for step in (10, 20, 30):
        state = {"w": torch.full((8, 4), float(step)), "b": torch.zeros(3, dtype=torch.bfloat16)}
        meta = {"step": step, "config": {"run": {"name": "größe"}}}
        checkpoint.save(tmp_path / "run" / "checkpoints", step, state, {}, Mesh.single(), meta)
    return tmp_path / "run"


def steps(run):
    return sorted(int(p.name.removeprefix("step_")) for p in (run / "checkpoints").iterdir())


def flip(run, step):
    piece = run / "checkpoints" / f"step_{step:08d}" / "piece_00000_00.safetensors"
    data = bytearray(piece.read_bytes())
    data[-1] ^= 1
    piece.write_bytes(data)


def test_ls_shows_each_and_says_what_is_broken(run, capsys):
    assert main(["checkpoint", "ls", str(run)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["30", "20", "10"]
    (run / "checkpoints" / "step_00000030" / "manifest.json").unlink()
    assert main(["checkpoint", "ls", str(run)]) == 4
    assert "incomplete" in capsys.readouterr().out.replace("\n", "")


def test_show_takes_the_newest_and_prints_tensors_and_meta(run, capsys):
    assert main(["checkpoint", "show", str(run)]) == 0
    said = capsys.readouterr().out
    assert "BF16" in said and "8 x 4" in said and '"step": 30' in said and "größe" in said


def test_verify_reads_all_or_one(run, capsys):
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("intact") == 3
    flip(run, 20)
    assert main(["checkpoint", "verify", str(run)]) == 4
    captured = capsys.readouterr()
    assert captured.out.count("intact") == 2 and "step_00000020/piece_00000_00.safetensors: damaged" in captured.err
    assert main(["checkpoint", "verify", str(run / "checkpoints" / "step_00000030")]) == 0


def test_prune_asks_the_run_and_obeys_the_line(run, capsys):
    (run / "config.toml").write_text("[checkpoint]\nkeep_last = 2\n")
    assert main(["checkpoint", "prune", str(run), "--dry-run"]) == 0
    assert "step_00000010: would go" in capsys.readouterr().out and steps(run) == [10, 20, 30]
    assert main(["checkpoint", "prune", str(run), "--keep-last", "1", "--keep-every", "20"]) == 0
    assert steps(run) == [20, 30]
    assert main(["checkpoint", "prune", str(run), "--keep-last", "0"]) == 2


def test_a_folder_without_checkpoints(tmp_path, capsys):
    for action in ("ls", "show", "verify", "prune"):
        assert main(["checkpoint", action, str(tmp_path)]) == 4
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_eval_prints_loss_and_perplexity(tmp_path, capsys):
    path = save_model(tmp_path / "ck", config_of())
    (tmp_path / "a.txt").write_text("some text to be scored")
    assert main(["eval", "--perplexity", str(path), "--text", str(tmp_path / "a.txt"), "--dtype", "fp32"]) == 0
    said = capsys.readouterr().out
    assert "perplexity" in said and "tokens 22" in said and "bits/byte" in said
    assert main(["eval", "--perplexity", str(path), "--data", str(tmp_path / "none")]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1
