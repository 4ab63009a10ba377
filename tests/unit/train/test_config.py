"""train/config and train/check: what is refused before any process starts, and what every example would be."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megafp8.cli.main import split_overrides
from megafp8.core.config import build, dump_toml, load_toml, to_dict
from megafp8.core.errors import ConfigError
from megafp8.core.recipe_options import DIM_MULTIPLES
from megafp8.models import ModelConfig
from megafp8.nn.precision import RECIPES
from megafp8.train.check import dry_run, smallest_world
from megafp8.train.config import RunConfig, check_run, load_run_config, refuse_broken

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*/pretrain*.toml"))
NAMES = [f"{path.parent.name}/{path.stem}" for path in EXAMPLES]
TINY = ROOT / "examples/tiny_cpu/pretrain.toml"


@pytest.mark.parametrize("path", EXAMPLES, ids=NAMES)
def test_every_example_is_planned(path):
    config = load_run_config(path)
    world = max(smallest_world(config), 2)
    report = dry_run(config, world)
    assert report.problems == ()
    rows = dict(report.rows)
    assert {"model", "parameters", "ranks", "memory a rank", "checkpoint", "tokens"} <= set(rows)


@pytest.mark.parametrize("path", EXAMPLES, ids=NAMES)
def test_resolved_configuration_round_trips(path, tmp_path):
    config = load_run_config(path)
    (tmp_path / "c.toml").write_text(dump_toml(config, comments=True))
    assert build(RunConfig, load_toml(tmp_path / "c.toml")) == config


def test_the_experiment_fits_544_gpus_and_every_recipe():
    folder = ROOT / "examples/fp8_vs_bf16"
    large = dry_run(load_run_config(folder / "pretrain_1b5.toml"), 544)
    assert large.problems == ()
    rows = dict(large.rows)
    assert rows["parameters"].startswith("1,470,203,904") and "3,000,000," in rows["tokens"]
    for toml in ("pretrain.toml", "pretrain_1b5.toml"):
        for recipe in ("none", *RECIPES):
            config = load_run_config(folder / toml, ["--precision.recipe", recipe])
            assert check_run(config, 1 if toml == "pretrain.toml" else 544) == []


def test_all_broken_rules_at_once_with_ways_out():
    config = load_run_config(
        TINY,
        [
            *("--parallel.tp", "4", "--train.global_batch", "30", "--data.sequence_length", "255"),
            *("--model.num_attention_heads", "12", "--model.num_kv_heads", "3", "--model.head_dim", "16"),
        ],
    )
    text = "\n".join(check_run(config, 8))
    assert "model.num_kv_heads 3 and parallel.tp 4: the one must be a multiple of the other; nearest: " in text
    assert "global_batch 30 is not divisible by dp 2 x train.micro_batch 4; nearest: 24, 32" in text
    assert "sequence_length 255 is not divisible by parallel.tp 4" in text
    with pytest.raises(ConfigError):
        refuse_broken(config, 8)


def test_fp8_statistics_of_no_module_or_of_no_recipe_are_refused():
    fp8 = ["--precision.recipe", "delayed", "--precision.first_layers_bf16", "1"]
    config = load_run_config(TINY, [*fp8, "--log.fp8_modules", "mlp.donw"])
    last = config.model.num_layers - 1
    (problem,) = check_run(config, 1)
    assert problem == (
        "log.fp8_modules = 'mlp.donw': matches no linear in FP8; they are attention.qkv, attention.out, mlp.gate_up, "
        f"mlp.down in layers.1 to layers.{last}"
    )
    assert check_run(load_run_config(TINY, [*fp8, "--log.fp8_modules", r"layers\.1\..*down$"]), 1) == []
    # a file shared by a run in bf16 and one in FP8
    assert check_run(load_run_config(TINY, ["--precision.recipe", "none", "--log.fp8_modules", "mlp.donw"]), 1) == []
    with pytest.raises(ConfigError) as caught:
        load_run_config(TINY, ["--log.fp8_modules", "(", "--log.fp8_what_if", '["mxpf8", "delayed"]'])
    lines = str(caught.value)
    assert "log: fp8_what_if = 'mxpf8': is not one of current, blockwise, mxfp8, nvfp4; nearest: mxfp8" in lines
    assert "fp8_what_if = 'delayed': its scales come from amax histories" in lines
    assert "fp8_modules = '(': not a regular expression" in lines


def test_a_sequence_longer_than_the_model_takes_is_refused():
    config = load_run_config(TINY, ["--data.sequence_length", "512"])
    assert any("512" in p and "max_sequence_length" in p for p in check_run(config, 1))


def test_tokens_that_fp8_cannot_take():
    odd = ["--data.sequence_length", "250", "--train.micro_batch", "2"]
    assert check_run(load_run_config(TINY, odd), 1) == []
    (problem,) = check_run(load_run_config(TINY, [*odd, "--precision.recipe", "delayed"]), 1)
    assert "= 500 tokens are not a multiple of 16, as recipe delayed needs; nearest data.sequence_length: 240, 256" in (
        problem
    )


def test_tokens_of_each_recipe_are_judged_where_a_rank_sums_them():
    wide = ["--model.hidden_size", "256", "--model.ffn_hidden_size", "256", "--model.num_attention_heads", "4"]
    words = [*wide, "--data.sequence_length", "96", "--train.micro_batch", "1", "--model.max_sequence_length", "256"]
    problems = {r: check_run(load_run_config(TINY, [*words, "--precision.recipe", r]), 1) for r in DIM_MULTIPLES}
    (line,) = problems.pop("blockwise")
    assert "= 96 tokens are not a multiple of 128, as recipe blockwise needs" in line
    assert line.endswith("nearest data.sequence_length: 128, or micro_batch: a multiple of 4")
    assert not any(problems.values())
    cut = check_run(load_run_config(TINY, [*words, "--precision.recipe", "mxfp8", "--parallel.cp", "2"]), 2)
    assert "are not a multiple of 32 x parallel.cp 2, as recipe mxfp8 needs" in " ".join(cut)
    # of the strictest recipe in use; experts' rows are padded
    mixed = [*words, "--precision.recipe", "current", "--precision.patterns", '{ "qkv" = "blockwise" }']
    assert "multiple of 128, as recipe blockwise" in " ".join(check_run(load_run_config(TINY, mixed), 1))


def test_a_batch_ramp_is_planned_and_judged():
    config = load_run_config(TINY, ["--train.batch_ramp", "[4, 4, 100]", "--train.micro_batch", "4"])
    rows = dict(dry_run(config, 1).rows)
    assert rows["micro-batches a step"].startswith("1 to 4 of 4")
    assert "4 batch sizes" in rows["tokens"]
    assert [p.split(";")[0] for p in check_run(config, 2)] == [
        "train.batch_ramp's start 4 is not divisible by dp 2 x train.micro_batch 4",
        "train.batch_ramp's increment 4 is not divisible by dp 2 x train.micro_batch 4",
    ]
    with pytest.raises(ConfigError, match="start 16 is not below global_batch 16"):
        load_run_config(TINY, ["--train.batch_ramp", "[16, 4, 100]"])


def test_a_wrong_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"train\.step: unknown key; nearest: steps"):
        load_run_config(TINY, ["--train.step", "3"])


def test_presets_fill_in_and_what_is_written_wins():
    config = load_run_config(ROOT / "examples/llama3_8b/pretrain.toml", ["--model.num_layers", "2"])
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_kv_heads) == (2, 4096, 8)
    assert to_dict(config)["model"]["preset"] == "llama3_8b"


def _megafp8(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "megafp8", *words], capture_output=True, text=True, cwd=ROOT)


def test_the_command_line_refuses_in_one_line_each_with_code_2():
    done = _megafp8("check", str(TINY), "--ranks", "3", "--train.stps", "5")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "train.stps: unknown key; nearest: steps" in done.stderr
    done = _megafp8("check", str(TINY), "--ranks", "3")
    assert done.returncode == 2 and "not divisible by dp 3" in done.stderr and "Traceback" not in done.stderr
    done = _megafp8("pretrain", str(TINY), "--nproc", "3")
    assert done.returncode == 2 and "not divisible by dp 3" in done.stderr
    done = _megafp8("pretrian")
    assert done.returncode == 2 and "nearest: pretrain" in done.stderr
    done = _megafp8("check", str(TINY), "--rank", "3")
    assert done.returncode == 2 and "--rank: megafp8 check does not know this argument; nearest: --ranks" in done.stderr


def test_overrides_may_stand_anywhere():
    words = ["--a.b", "1", "x.toml", "--nproc", "2", "--c.d=3", "--e.f", "-4", "--debug"]
    assert split_overrides(words) == (["--a.b", "1", "--c.d=3", "--e.f", "-4"], ["x.toml", "--nproc", "2", "--debug"])
    done = _megafp8("check", "--train.steps", "77", str(TINY), "--ranks", "2")
    assert done.returncode == 0 and "in 77 steps" in done.stdout


def test_check_and_print_config():
    done = _megafp8("check", str(TINY), "--ranks", "2")
    assert done.returncode == 0 and "nothing would be refused" in done.stdout
    done = _megafp8("pretrain", str(TINY), "--print-config", "--optimizer.lr", "0.001")
    assert done.returncode == 0 and "lr = 0.001  # default: 0.0003" in done.stdout


@pytest.mark.parametrize("overrides, nearest", [
    (["--train.recompute_layers", "1"], 'nearest: 0, or recompute = "full"'),
    (["--train.recompute", "full", "--train.recompute_layers", "3"], "at most 2 layers; nearest: 2"),
])  # fmt: skip
def test_recomputed_layers_that_do_not_exist(overrides, nearest):
    problems = check_run(load_run_config(TINY, [*overrides, "--model.num_layers", "2"]), 1)
    assert [p for p in problems if "train.recompute_layers" in p and nearest in p]


def test_latent_attention_quantizes_shards_of_the_sequence():
    small = ["--precision.recipe", "delayed", "--train.micro_batch", "1", "--data.sequence_length", "48"]
    config = load_run_config(TINY, [*small, "--parallel.tp", "2"])
    assert not [p for p in check_run(config, 2) if "tokens are not" in p]
    latent = replace(config, model=ModelConfig(preset="tiny_deepseek"))
    (problem,) = [p for p in check_run(latent, 2) if "tokens are not" in p]
    assert "multiple of 16 x parallel.tp 2" in problem and "32, 64" in problem


def test_the_last_line_names_a_mesh_that_breaks_no_rule():
    """Each rule's own nearest value may break another rule; the last line holds for all of them."""
    model = ["--model.num_layers", "6", "--model.num_attention_heads", "8", "--model.num_kv_heads", "2"]
    for words, world, change in [
        (["--parallel.pp", "4", *model], 4, "pp = 2"),  # 6 layers: pp = 3 or 6, which 4 processes are not
        (["--parallel.tp", "3", "--parallel.pp", "4", "--parallel.cp", "5", *model], 4, "pp = 2, cp = 1, tp = 2"),
        (["--parallel.dp", "3", "--parallel.tp", "3", *model], 8, "dp = 0, tp = 4"),
    ]:
        problems = check_run(load_run_config(TINY, words), world)
        assert problems[-1] == f"parallel: the nearest mesh of {world} processes that breaks no rule has {change}"
        follow = [word for pair in change.split(", ") for word in ("--parallel." + pair).split(" = ")]
        assert check_run(load_run_config(TINY, [*words, *follow]), world) == []


def test_rules_of_the_mesh_the_batch_and_fp8_come_at_once():
    words = ["--parallel.tp", "2", "--parallel.cp", "2", "--train.global_batch", "7", "--train.micro_batch", "2"]
    odd = ["--model.ffn_hidden_size", "272", "--data.sequence_length", "250", "--precision.recipe", "current"]
    problems = " ".join(check_run(load_run_config(TINY, [*words, *odd]), 6))
    for part in ("does not divide 6", "global_batch 7", "sequence_length 250", "mlp.down", "tokens are not"):
        assert part in problems, part


def test_no_rank_at_all_is_refused():
    for number in ("0", "-3"):
        done = _megafp8("pretrain", str(TINY), "--nproc", number)
        assert done.returncode == 2 and f"--nproc {number}: at least one rank is needed" in done.stderr
