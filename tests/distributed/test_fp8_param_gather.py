"""FP8 weights gathered as codes: no bit of a run changes, and a byte travels where two (bf16) or four (fp32) did."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.core.errors import ConfigError
from megafp8.fp8 import stats
from megafp8.parallel import weight_gather
from megafp8.train.config import RunConfig, check_run
from megafp8.train.state import load_newest_run, save_run, tensors_of
from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import MODEL, make_parts, run_config

Values = dict[str, Any]
SIZES = MODEL | {"hidden_size": 64, "ffn_hidden_size": 128, "num_kv_heads": 2, "max_sequence_length": 32}
WIDE = SIZES | {"hidden_size": 256, "ffn_hidden_size": 256, "num_kv_heads": 4, "num_layers": 1}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "num_shared_experts": 1}
STEPS = 4


def config_of(recipe: str, *, gather: bool = True, folder: str = "unused", **more: Any) -> RunConfig:
    """Delayed scaling's warm-up ends after the second step, so that weights change from own scales to delayed ones."""
    precision = {"dtype": "bf16", "recipe": recipe, "fp8_param_gather": gather, "warmup_steps": 2}
    return run_config(
        run={"dir": folder},
        model=more.get("model", SIZES),
        data={"sequence_length": 32},
        train={"global_batch": 8, "micro_batch": 2, "compile": "off", **more.get("train", {})},
        optimizer={"lr": 1e-2, "schedule": "constant", "clip_grad": 1.0, **more.get("optimizer", {})},
        precision=precision | more.get("precision", {}),
        parallel={"dp": 2, "dp_shard": "optimizer", **more.get("parallel", {})},
    )


class Counter:
    """Bytes that this rank gets from others in gathers of weights."""

    def __init__(self) -> None:
        self.num_bytes, self._real = 0, weight_gather.start_all_gather_

    def __call__(self, rows: torch.Tensor, group: Any) -> Any:
        self.num_bytes += rows.nbytes // len(rows) * (len(rows) - 1)
        return self._real(rows, group)

    def __enter__(self) -> Counter:
        weight_gather.start_all_gather_ = self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        weight_gather.start_all_gather_ = self._real


def train(rank: int, world: int, config: RunConfig, save: bool = False) -> Values:
    """Losses, norms, an evaluation between steps, bytes gathered after the last step, and the state."""
    parts = make_parts(config, world)
    parts.corpus = {"fingerprint": "made"}
    found: Values = {"losses": [], "norms": [], "eval": []}
    for step in range(1, STEPS + 1):
        with Counter() as counter:
            result = train_step(parts, step, config.optimizer.lr)
            found["eval"].append(evaluated(parts))
        assert result.finite
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
        if save and step == 3:
            save_run(parts, 3, {})
    found["bytes"] = counter.num_bytes
    return found | {"state": state_of(parts), "freed": freed(parts)}


@torch.no_grad()
def evaluated(parts: Any) -> float:
    """A loss between two steps, which must leave no trace; nothing where the pipeline is cut."""
    if len(parts.stages) > 1 or not parts.stages[0].span.last or parts.stages[0].embedding is None:
        parts.optimizer.wait()
        return 0.0
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (2, 33), generator=generator)
    parts.stages[0].eval()
    return float(parts.stages[0](tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[0])


def state_of(parts: Any) -> Values:
    parts.optimizer.wait()
    return {name: tensor.float().numpy().copy() for name, tensor in tensors_of(parts)[0].items()}


def freed(parts: Any) -> tuple[int, int]:
    """Elements of all parameters, and of those without memory of their own."""
    params = dict(parts.named_parameters).values()
    gone = [p for p in params if getattr(p, "in_codes", False)]
    assert all(p.untyped_storage().nbytes() == p.itemsize and p.isnan().all() for p in gone)
    return sum(p.numel() for p in params), sum(p.numel() for p in gone)


def with_and_without(rank: int, world: int, configs: list[tuple[RunConfig, RunConfig]]) -> list[tuple[Values, Values]]:
    return [(train(rank, world, a), train(rank, world, b)) for a, b in configs]


def pair(recipe: str, **more: Any) -> tuple[RunConfig, RunConfig]:
    return tuple(config_of(recipe, gather=gather, **more) for gather in (True, False))  # type: ignore[return-value]


def hold(pairs: list[tuple[RunConfig, RunConfig]], world: int) -> list[list[tuple[Values, Values]]]:
    """Train each pair: everything is equal, bit for bit, on every rank."""
    ranks = run_ranks(with_and_without, world, pairs)
    for results in ranks:
        for coded, plain in results:
            for key in ("losses", "norms", "eval"):
                assert coded[key] == plain[key], key
            assert coded["state"].keys() == plain["state"].keys()
            assert not [n for n, t in coded["state"].items() if not np.array_equal(t, plain["state"][n])]
    return ranks


EXACT = {"dtype": "fp32", "emulation": "exact"}


def test_no_bit_changes_and_half_the_bytes_travel():
    pairs = [pair("delayed"), pair("delayed", precision=EXACT), pair("current")]
    for results in hold(pairs, 2):
        for (coded, plain), size in zip(results, (2, 4, 2), strict=True):
            total, gone = coded["freed"]
            assert plain["freed"] == (total, 0) and gone == 2 * 64 * (96 + 64 + 3 * 128)
            # one other replica: of every weight it sends its half
            assert plain["bytes"] == total * size // 2
            assert coded["bytes"] == (total - gone) * size // 2 + gone // 2


def test_square_blocks_travel_with_their_scales():
    mx, model = {"options": {"enable_2d_quantization": True}}, SIZES | {"num_kv_heads": 4}
    pairs = [
        pair("mxfp8", model=model, precision=mx),
        pair("mxfp8", model=model, precision=mx | EXACT),
        pair("nvfp4"),
        pair("nvfp4", precision=EXACT),
        pair("blockwise", model=WIDE, precision=EXACT),
        pair("blockwise", model=WIDE, precision={"options": {"use_f32_scales": True}}),
    ]
    for results in hold(pairs, 2):
        for (coded, plain), (config, _) in zip(results, pairs, strict=True):
            total, gone = coded["freed"]
            precision = config.precision
            size = {"bf16": 2, "fp32": 4}[precision.dtype]
            each = {"mxfp8": 1 + 1 / 32**2, "nvfp4": 1 / 2 + 1 / 16**2, "blockwise": 1 + 4 / 128**2}[precision.recipe]
            assert plain["bytes"] == total * size // 2
            assert coded["bytes"] == (total - gone) * size // 2 + gone * each / 2


def test_with_tensor_parallel_ranks_and_shared_heads():
    # one kv head for two tp ranks: each uses rows of a weight that both hold
    shared = SIZES | {"num_kv_heads": 1, "num_layers": 1}
    pairs = [pair(r, parallel={"tp": 2}, model=m) for r, m in (("delayed", shared), ("current", shared))]
    hold([*pairs, pair("delayed", parallel={"tp": 2}, precision={"options": {"reduce_amax": False}})], 4)


def test_with_experts_and_muon_and_smoothed_channels():
    model = SIZES | {"moe": EXPERTS, "num_layers": 1}
    pairs = [
        pair("current", model=model),
        pair("delayed", optimizer={"name": "muon"}),
        pair("current", model=model, precision={"smooth_swiglu": True}),
    ]
    for results in hold(pairs, 2):
        gone, smoothed = results[0][0]["freed"][1], results[2][0]["freed"][1]
        assert gone > 4 * 3 * 64 * 32  # experts' among them
        assert gone - smoothed == (4 + 1) * 64 * 32  # down, which differs in every pass, keeps its values


@pytest.mark.slow
def test_with_pipeline_stages():
    schedules = [{"schedule": "1f1b"}, {"schedule": "zb_v"}]
    hold([pair("delayed", model=SIZES | {"num_layers": 4}, parallel={"pp": 2, **s}) for s in schedules], 4)


@pytest.mark.slow
def test_with_context_parallel_ranks_recompute_and_native_gemms():
    cp = {"dp": 1, "cp": 2}
    pairs = [pair("delayed", parallel=cp), pair("current", precision={"backend": "native"})]
    hold([*pairs, pair("delayed", train={"recompute": "full"}), pair("delayed", train={"compile": "on"})], 2)


def resume_each(rank: int, world: int, configs: list[RunConfig]) -> list[Values]:
    return [resume(rank, world, config) for config in configs]


def resume(rank: int, world: int, config: RunConfig) -> Values:
    parts = make_parts(config, world)
    parts.corpus = {"fingerprint": "made"}
    assert load_newest_run(parts) is not None
    results = [train_step(parts, step, config.optimizer.lr) for step in range(4, STEPS + 1)]
    return {"losses": [r.loss for r in results], "state": state_of(parts)}


def test_a_resumed_run_has_the_bits_of_one_that_went_through(tmp_path):
    configs = list(pair("delayed", folder=str(tmp_path)))
    through = run_ranks(train, 2, configs[0], True)
    for whole, resumed in zip(through, run_ranks(resume_each, 2, configs), strict=True):
        for again in resumed:  # with the option and, which may change between two starts, without
            assert again["losses"] == whole["losses"][3:]
            assert not [n for n, t in again["state"].items() if not np.array_equal(t, whole["state"][n])]


def watched(rank: int, world: int) -> list[Values]:
    return [watch(config, world) for config in pair("delayed")]


def watch(config: RunConfig, world: int) -> Values:
    """Statistics of a step, then one whose loss is not finite, then two more."""
    parts = make_parts(config, world)
    for step in (1, 2):
        train_step(parts, step, 1e-2)
    stats.arm(parts.fp8_states.values())
    train_step(parts, 3, 1e-2)
    seen = stats.read(parts.fp8_states.values())
    before = state_of(parts)
    norm = dict(parts.named_parameters)["layers.1.mlp_norm.weight"]
    kept = norm.detach().clone()
    norm.data.fill_(torch.nan)
    result = train_step(parts, 4, 1e-2)
    norm.data.copy_(kept)
    after = state_of(parts)
    losses = [train_step(parts, step, 1e-2).loss for step in (5, 6)]
    same = [n for n in before if not np.array_equal(before[n], after[n])]
    return {"stats": seen, "origin": str(result.origin), "changed": same, "losses": losses, "state": state_of(parts)}


def test_statistics_see_the_weight_and_a_failed_step_leaves_no_trace():
    for found, plain in run_ranks(watched, 2):
        mse = [v for name, v in found["stats"].items() if name.endswith("out.weight.mse")]
        assert len(mse) == 2 and all(0 < value < 1e-3 for value in mse)
        # the amax of weights counts in the step after the failed one, too
        assert found["losses"] == plain["losses"]
        assert not [n for n, t in found["state"].items() if not np.array_equal(t, plain["state"][n])]
        assert "weight of layers.1.mlp_norm" in found["origin"]  # not a weight that has only codes
        assert not found["changed"] and np.isfinite(found["losses"]).all()


def refused(rank: int, world: int, configs: list[RunConfig]) -> list[str]:
    lines = []
    for config in configs:
        try:
            make_parts(config, world)
        except ConfigError as error:
            lines.append(str(error))
    return lines


def test_weights_that_are_not_cut_on_blocks_are_refused_by_name():
    narrow = config_of("blockwise", model=WIDE | {"hidden_size": 128, "num_kv_heads": 4})
    for (lines,) in run_ranks(refused, 2, [narrow]):
        assert "layers.0.attention.out.weight (128, 128): its 2 pieces do not end where blocks of 128x128 do" in lines
        assert "layers.0.mlp.down.weight" in lines and "gate_up" not in lines
        ends = "nearest: fp8_param_gather = false, or a dp x cp that cuts on blocks"
        assert all(line.endswith(ends) for line in lines.splitlines())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parallel": {"dp_shard": "none"}}, 'with parallel.dp_shard = "none" no rank gathers weights; nearest: false'),
        ({"parallel": {"dp_shard": "full"}}, 'with parallel.dp_shard = "full" fully_shard gathers weights in dtype'),
        ({"recipe": "none"}, 'with recipe = "none" no weight is in FP8; nearest: false, or a recipe'),
        ({"recipe": "mxfp8"}, "recipe mxfp8: .* nearest: false, or options.enable_2d_quantization = true"),
        ({"precision": {"backend": "te"}}, "Transformer Engine's layers quantize their weights themselves"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(change, said):
    recipe = change.pop("recipe", "delayed")
    lines = check_run(config_of(recipe, **change), 2)
    assert any(line.startswith("precision.fp8_param_gather = true: ") for line in lines)
    assert re.search(said, "\n".join(lines))
