"""Activation memory: the closed forms against what a layer is measured to keep, and against published ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megafp8.models import ModelConfig
from megafp8.models.activations import Workload, activation_bytes, checkpoint_of_layer
from megafp8.models.builder import build_stages
from megafp8.models.cost import num_parameters
from megafp8.models.memory import _elements_of, memory_bytes, memory_of_ranks
from megafp8.models.stages import split_layers
from megafp8.nn.precision import PrecisionConfig
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.layers_kept import layer_bytes

LLAMA = {
    "family": "llama", "hidden_size": 128, "ffn_hidden_size": 352, "num_attention_heads": 8, "num_kv_heads": 4,
    "vocab_size": 64,
}  # fmt: skip
GPT = {"family": "gpt", "hidden_size": 128, "ffn_hidden_size": 512, "num_attention_heads": 8, "vocab_size": 64}
MLA = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"num_experts": 64, "top_k": 6, "ffn_hidden_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": LLAMA | {"family": "qwen3", "head_dim": 16},
    "gpt": GPT | {"hidden_dropout": 0.1, "attention_dropout": 0.0},
    "gpt, weights dropped": GPT | {"hidden_dropout": 0.0, "attention_dropout": 0.1},
    "latent": LLAMA | {"num_kv_heads": 8, "mla": MLA},
    "mixtral": LLAMA | {"family": "mixtral", "moe": {"num_experts": 8, "top_k": 2}},
    "deepseek": LLAMA
    | {
        "family": "deepseek", "num_kv_heads": 8, "mla": MLA,
        "moe": EXPERTS | {"first_dense_layers": 0, "num_groups": 8, "aux_loss": "sequence", "aux_loss_coeff": 0.1},
    },
}  # fmt: skip


QUICK = {
    ("llama", "bf16", "none", "none"), ("llama", "bf16", "none", "selective"), ("llama", "bf16", "none", "full"),
    ("llama", "bf16", "delayed", "none"), ("llama", "fp32", "none", "none"), ("qwen3", "bf16", "none", "none"),
    ("gpt", "bf16", "none", "none"), ("gpt", "bf16", "none", "selective"), ("gpt", "bf16", "none", "full"),
    ("gpt, weights dropped", "bf16", "none", "none"), ("latent", "bf16", "none", "none"),
    ("latent", "fp32", "none", "selective"), ("mixtral", "bf16", "none", "none"),
    ("deepseek", "bf16", "none", "selective"),
}  # fmt: skip
CASES = [
    (name, dtype, recipe, recompute)
    for name in MODELS
    for dtype, recipe in (("bf16", "none"), ("bf16", "delayed"), ("fp32", "none"))
    for recompute in ("none", "selective", "full")
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow, id="-".join(case)) for case in CASES]
)
def test_a_layer_keeps_what_the_formula_says(case: tuple[str, str, str, str]) -> None:
    """Within 1%: uncounted are scales, counters of experts and a bias's rounding, some tens of bytes a token."""
    name, dtype, recipe, recompute = case
    attention: Any = "merged" if "mla" in MODELS[name] else "fused"
    if dtype == "bf16":
        attention = "blocked"
    if "dropped" in name:
        attention = "merged"
    precision = PrecisionConfig(dtype=dtype, recipe=recipe)  # type: ignore[arg-type]
    work = Workload(2, 48, precision=precision, recompute=recompute, attention=attention)
    measured, formula = layer_bytes(MODELS[name], work)
    assert measured == pytest.approx(formula, rel=0.01, abs=24 * 96)


@pytest.mark.parametrize("module", ["core_attention", "norm", "activation"])
def test_each_selected_module(module: str) -> None:
    cases = (("llama", "fp32", "fused"), ("gpt", "bf16", "blocked"), ("latent", "fp32", "merged"))
    for name, dtype, attention in cases:
        work = Workload(
            2, 48, recompute="selective", recompute_modules=(module,), attention=attention,  # type: ignore[arg-type]
            precision=PrecisionConfig(dtype=dtype),  # type: ignore[arg-type]
        )  # fmt: skip
        measured, formula = layer_bytes(MODELS[name], work)
        assert measured == pytest.approx(formula, rel=0.01), name


def test_published_closed_forms() -> None:
    """Korthikanti et al. 2022, table 2, without the matrices of s x s that no core of ours keeps; Llama's of
    performance.md. Theirs leave out statistics (4 bytes a token for each mean and deviation) and log-sum-exp."""
    s, h, t = 1024, 4096, 8
    gpt = ModelConfig(
        family="gpt", num_layers=2, hidden_size=h, ffn_hidden_size=4 * h, num_attention_heads=32, vocab_size=512,
        max_sequence_length=s, hidden_dropout=0.1,
    )  # fmt: skip
    statistics, lse = 16, 4 * 32
    one = Workload(1, s)
    split, alone = (Workload(1, s, parallel=ParallelConfig(tp=t, sequence_parallel=sp)) for sp in (True, False))
    assert activation_bytes(gpt, 0, one) == s * (34 * h + statistics + lse)
    assert activation_bytes(gpt, 0, split) == s * (34 * h + statistics + lse) / t
    assert activation_bytes(gpt, 0, alone) == s * ((10 + 24 / t) * h + statistics + lse / t)
    assert checkpoint_of_layer(gpt, one) == 2 * s * h and checkpoint_of_layer(gpt, split) == 2 * s * h / t

    llama = ModelConfig(preset="llama3_8b")
    h, f, a, g, b, length = 4096, 14336, 32, 8, 1, 8192
    work = Workload(b, length)
    assert activation_bytes(llama, 0, work) == length * ((12 + 4 * g / a) * h + 6 * f + 4 * a + 8)
    fp8 = replace(work, precision=PrecisionConfig(recipe="delayed"))
    assert activation_bytes(llama, 0, fp8) == length * ((11 + 4 * g / a) * h + 5 * f + 4 * a + 8)
    cp = replace(work, parallel=ParallelConfig(cp=4))
    assert activation_bytes(llama, 0, cp) * 4 == activation_bytes(llama, 0, work)


def test_in_flight_is_what_the_schedule_keeps() -> None:
    """performance.md 2.2, first stage: 1F1B p of L / p layers; interleaved L (1 + (p - 1) / (p v)); ZB-V and 1F1B
    alike; GPipe all micro-batches. Last stage of 1F1B: one."""
    config = ModelConfig(preset="llama3_8b")
    layer = activation_bytes(config, 0, Workload(1, 8192))

    def stages(schedule: str, virtual: int = 1, micro_batches: int = 16) -> list[float]:
        parallel = ParallelConfig(pp=4, schedule=schedule, virtual_stages=virtual)  # type: ignore[arg-type]
        ranks = memory_of_ranks(config, Workload(1, 8192, micro_batches, parallel=parallel))
        return [rank.activations / layer for rank in ranks]

    assert stages("1f1b")[0] == 4 * 8 and stages("1f1b")[3] == pytest.approx(8, rel=0.01)
    assert stages("1f1b", micro_batches=2)[0] == 2 * 8
    assert stages("gpipe", micro_batches=12)[0] == 12 * 8
    assert stages("interleaved", 4)[0] == pytest.approx(32 * (1 + 3 / 16), rel=0.02)
    assert stages("zb_h1")[0] == 32 and max(stages("zb_v")) == pytest.approx(32, rel=0.02)


def test_model_states() -> None:
    """performance.md 2.3: 18 bytes a parameter replicated, 6 + 12 / D with the optimizer sharded."""
    llama = ModelConfig(preset="llama3_8b")
    count = num_parameters(llama)

    def states(world: int, precision: PrecisionConfig | None = None, **parallel: Any) -> int:
        work = Workload(
            1, 8192, parallel=ParallelConfig(**parallel), world=world, precision=precision or PrecisionConfig()
        )
        parts = memory_bytes(llama, work)
        return parts.parameters + parts.gradients + parts.optimizer

    assert states(1) == states(8) == 18 * count
    assert states(8, dp_shard="optimizer") == 6 * count + 12 * count // 8
    whole = 2 * (states(8, tp=8, sequence_parallel=True) - 18 * count // 8)
    assert 0 < whole < 0.01 * states(1)  # norms are on all ranks
    layer = 2 * 2 * 218_112_000  # bf16, two layers
    assert states(8, dp_shard="full") == pytest.approx(18 * count / 8 + layer, rel=1e-3)
    linears = count - 2 * 128256 * 4096 - 65 * 4096
    assert states(1, PrecisionConfig(recipe="delayed")) == 18 * count + 2 * linears


def test_experts_states_are_sharded_over_their_own_replicas() -> None:
    """Megatron's issue 4050: dividing experts by tp under-reported their memory for two years."""
    mixtral = ModelConfig(preset="mixtral_8x7b")
    routed = 32 * 8 * 3 * 4096 * 14336
    work = Workload(1, 4096, parallel=ParallelConfig(tp=4, ep=8, etp=1), world=32)
    dense, experts = _elements_of(mixtral, work, list(split_layers(mixtral, work.parallel)))
    assert experts == routed // 8
    assert dense * 4 == pytest.approx(num_parameters(mixtral) - routed, rel=5e-3)  # norms, routers on all


@pytest.mark.parametrize("preset", ["tiny_llama", "tiny_gpt", "tiny_qwen3", "tiny_mixtral", "tiny_deepseek"])
def test_elements_of_stages_are_those_built(preset: str) -> None:
    config = ModelConfig(preset=preset, num_layers=4)
    parallel = ParallelConfig(pp=2, layers_per_stage=(1, 3))
    spans = split_layers(config, parallel)
    for span in spans:
        (stage,) = build_stages(config, [span], mesh=Mesh.single(), device="meta")
        expected = sum(_elements_of(config, Workload(1, 64, parallel=parallel), [span]))
        assert sum(p.numel() for p in stage.parameters()) == expected


def test_full_recompute_by_block_count() -> None:
    config, all_of = ModelConfig(preset="llama3_8b"), Workload(1, 8192, recompute="full")
    layer, kept = activation_bytes(config, 0, all_of), checkpoint_of_layer(config, all_of)
    assert memory_bytes(config, all_of).activations == 32 * kept + layer + kept  # and the final norm's input
    assert memory_bytes(config, replace(all_of, recompute_layers=8)).activations == 8 * kept + 25 * layer + kept


def test_narrow_moments_take_less_of_the_optimizer() -> None:
    llama = ModelConfig(preset="llama3_8b")
    count = num_parameters(llama)
    work = Workload(1, 8192, parallel=ParallelConfig(dp_shard="optimizer"), world=8)
    for moments, element, block in ((("fp8", "fp8"), 2, 6), (("bf16", "fp8"), 3, 5), (("bf16", "bf16"), 4, 4)):
        parts = memory_bytes(llama, replace(work, moments=moments))
        assert parts.optimizer == count // 8 * (4 + element) + count // 8 // 128 * block


def test_weights_gathered_as_codes_have_no_values() -> None:
    llama = ModelConfig(preset="llama3_8b")
    linears = num_parameters(llama) - 2 * 128256 * 4096 - 65 * 4096
    sharded = ParallelConfig(dp_shard="optimizer")
    plain = Workload(1, 8192, parallel=sharded, world=8, precision=PrecisionConfig(recipe="current"))
    coded = replace(plain, precision=replace(plain.precision, fp8_param_gather=True))
    assert memory_bytes(llama, plain).parameters - memory_bytes(llama, coded).parameters == 2 * linears
    alone = replace(coded, world=1)  # one replica gathers nothing
    assert memory_bytes(llama, alone).parameters == memory_bytes(llama, plain).parameters
    smooth = replace(coded, precision=replace(coded.precision, smooth_swiglu=True))
    down = 32 * 4096 * 14336
    assert memory_bytes(llama, smooth).parameters - memory_bytes(llama, coded).parameters == 2 * down
