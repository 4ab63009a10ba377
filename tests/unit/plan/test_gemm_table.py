"""Every GEMM is listed with its recipe or with why it is not in FP8; FLOPs add up to the model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.cli.main import main
from megafp8.models import ModelConfig
from megafp8.models.config import quantizable_shapes
from megafp8.models.cost import flops_per_token
from megafp8.nn.precision import PrecisionConfig
from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.plan.gemm_table import GemmPlan, plan_gemm_table, sharded_note

ROOT = Path(__file__).resolve().parents[3]
LLAMA, MIXTRAL = (str(ROOT / f"examples/{name}/pretrain.toml") for name in ("llama3_8b", "mixtral_8x7b"))
PRESETS = ["tiny_llama", "llama3_8b", "mixtral_8x7b", "deepseek_v3"]


def plan(model: ModelConfig, precision: PrecisionConfig, world: int = 1, **parallel: int) -> GemmPlan:
    mesh = ParallelConfig(**parallel)
    return plan_gemm_table(model, precision, mesh, world=world, micro_batch=2, sequence_length=128)


@pytest.mark.parametrize("preset", PRESETS)
def test_flops_and_gemms_are_all_the_models(preset: str) -> None:
    model = ModelConfig(preset=preset)
    for precision in (PrecisionConfig(), PrecisionConfig(recipe="current", last_layers_bf16=1)):
        found = plan(model, precision)
        # sums of integers below 2^53
        assert sum(gemm.flops for gemm in found.gemms) == flops_per_token(model, 128, causal=True)
        layered = [f"layers.{gemm.layers[0]}.{gemm.name}" for gemm in found.gemms if gemm.layers]
        assert set(quantizable_shapes(model)) <= set(layered)
        assert all(gemm.in_fp8 or gemm.why for gemm in found.gemms), "nothing is out of FP8 without a word"
        merged = found.collapsed()
        assert merged.counts == found.counts and merged.fp8_share == pytest.approx(found.fp8_share, rel=1e-12)
    assert plan(model, PrecisionConfig()).counts[0] == 0


def test_dims_are_a_ranks_own_and_counts_those_of_its_experts() -> None:
    model = ModelConfig(preset="mixtral_8x7b", num_layers=2)
    gemms = {
        gemm.name: gemm
        for gemm in plan(model, PrecisionConfig(recipe="mxfp8"), 4, tp=2, ep=2, etp=2, dp=2).gemms
        if gemm.layers in ((0,), (0, 1), ())
    }
    hidden, ffn = model.hidden_size, model.moe.ffn_hidden_size
    assert (gemms["attention.out"].in_features, gemms["attention.out"].out_features) == (model.q_size // 2, hidden)
    down = gemms["mlp.experts.down"]
    assert (down.in_features, down.out_features, down.matrices, down.rows) == (ffn // 2, hidden, 4, 0)
    assert gemms["attention.qkv"].rows == 256
    assert gemms["mlp.router"].recipe == "fp32" and gemms["mlp.router"].why == "rule: routers are in fp32"
    assert gemms["output"].why == "rule: the output layer is in bf16"


def test_formats_scales_and_reasons() -> None:
    model = ModelConfig(preset="tiny_llama", num_layers=4, hidden_size=256, ffn_hidden_size=256)
    precision = PrecisionConfig(
        recipe="delayed", first_layers_bf16=1, patterns={"down": "nvfp4", "out": "blockwise", r"layers\.3\.": "none"}
    )
    rows = {(gemm.layers_shown, gemm.name): gemm for gemm in plan(model, precision).collapsed().gemms}
    qkv = rows["1-2", "attention.qkv"]
    assert (qkv.recipe, qkv.forward, qkv.backward, qkv.scales) == ("delayed", "E4M3 x E4M3", "E5M2 x E4M3", "tensor")
    down, out = rows["0-2", "mlp.down"], rows["0-2", "attention.out"]
    assert (down.forward, down.backward, down.scales) == ("E2M1 x E2M1", "E2M1 x E2M1", "1x16, weights 16x16")
    assert out.scales == "1x128, weights 128x128" and out.backend == "emulated"
    assert rows["0", "attention.qkv"].why == "first_layers_bf16 = 1"
    assert rows["3", "mlp.down"].why == r"pattern 'layers\\.3\\.'"


def test_a_dim_that_does_not_fit_is_said_to_be_refused() -> None:
    model = ModelConfig(preset="tiny_llama", ffn_hidden_size=176)
    rows = {gemm.name: gemm for gemm in plan(model, PrecisionConfig(recipe="mxfp8")).gemms}
    assert rows["mlp.down"].why == "refused: in dim 176 is not a multiple of 32" and not rows["mlp.down"].in_fp8


def test_a_shard_that_ends_inside_a_block_is_said() -> None:
    note = sharded_note(PrecisionConfig(recipe="blockwise"), ["blockwise"], 96)
    assert note.startswith("a sequence shard of 96 tokens ends inside a block (blockwise 128): it is gathered in bf16")
    assert sharded_note(PrecisionConfig(recipe="delayed"), ["delayed"], 8) == ""


def test_transformer_engines_layers_are_named_as_their_own_backend() -> None:
    found = plan(ModelConfig(preset="tiny_llama"), PrecisionConfig(recipe="delayed", backend="te"))
    assert found.backend == "te" and {gemm.backend for gemm in found.gemms if gemm.in_fp8} == {"te"}


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--precision", LLAMA, "--precision.recipe", "delayed", "--precision.first_layers_bf16=1"]) == 0
    out = capsys.readouterr().out
    assert "GEMMs of the linears are in FP8" in out and "rule: the output layer is in bf16" in out
    assert "first_layers_bf16 = 1" in out and "backend emulated: auto: no CUDA device" in out
    assert main(["plan", "--precision", MIXTRAL, "--all", "--json", "--precision.recipe=current"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "emulated" and found["problems"] == [] and found["fp8_gemms"] <= found["linear_gemms"]
    assert 0 < found["fp8_flops_share"] < 1
    assert sum(gemm["name"] == "mlp.experts.down" for gemm in found["gemms"]) == 32


def test_what_a_run_would_be_refused_for_is_shown_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--precision", LLAMA, "--precision.recipe=blockwise", "--model.ffn_hidden_size=14464"]
    assert main(words) == 2
    done = capsys.readouterr()
    assert "refused: in dim 3616 is not a multiple of 128" in done.out
    assert "layers.1-30.mlp.down: in dim 3616" in " ".join(done.err.split())
    assert main(["plan", "--precision"]) == 2 and "--precision needs a CONFIG" in capsys.readouterr().err
    assert main(["plan", "--mesh", LLAMA, "--json"]) == 2
