"""FP8 under every axis, emulated in fp32: the curve of one process, one scale a tensor, state that resumes bit for bit.

Delayed scaling takes its amaxes over all ranks that hold pieces of a tensor, so scales, and with them the codes, are
those of one process. Current scaling gives a piece that its rank uses alone a scale of its own.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.core.config import build
from megafp8.data.loader import Batch
from megafp8.train.config import RunConfig, check_run
from megafp8.train.setup import Parts, assemble, make_mesh
from megafp8.train.state import load_newest_run, save_run, tensors_of
from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks

Values = dict[str, Any]
States = dict[str, torch.Tensor]
SAMPLES, LENGTH, VOCAB = 8, 32, 64
FROZEN, STEPS = 3, 5  # the first steps move no weight
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "num_shared_experts": 1}

# Before any scale differs from 1, or where all codes are the same: fp32 sums of 10^2 terms in another order.
LOSS, NORM = 1e-6, 1e-5
# Scales that are 1e-7 off carry one of 10^6 activations over the border of two codes; what follows of that token then
# has codes of its own, with FP8's noise: 2^-4 / sqrt(3) of each element, up to 0.1 nats of its loss. Spread over a
# sequence by attention that is 0.1 sqrt(32) of random sign, in a mean over 256 tokens: 5e-4 of a loss of 4.4. An amax
# is one such element: 2.5 deviations.
FLIPPED, FLIPPED_NORM, FLIPPED_AMAX = 5e-4, 5e-3, 0.1
# Codes under a scale of their own differ on all tokens: 0.1 / sqrt(256), twice, and 2.5 deviations: 0.02 of 4.4. So do
# all codes once weights move: AdamW makes a whole step of a gradient that is 0 in one order of summation, 1e-10 in
# another.
NOISE, NOISE_NORM = 5e-3, 0.05


class Samples:
    """The same sequences by number on every mesh."""

    def __init__(self, micro_batches: int, dp_rank: int, dp_size: int) -> None:
        self.micro_batches, self.dp_rank, self.dp_size = micro_batches, dp_rank, dp_size
        self.consumed_samples, self.global_batch = 0, SAMPLES

    def next_step(self) -> list[Batch]:
        generator = torch.Generator().manual_seed(self.consumed_samples)
        tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH + 1), generator=generator)
        ids = torch.arange(SAMPLES) + self.consumed_samples
        self.consumed_samples += SAMPLES
        rows = SAMPLES // (self.micro_batches * self.dp_size)
        starts = [(m * self.dp_size + self.dp_rank) * rows for m in range(self.micro_batches)]
        return [
            Batch(tokens[s : s + rows, :-1].contiguous(), tokens[s : s + rows, 1:].contiguous(), ids[s : s + rows])
            for s in starts
        ]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A recipe on a mesh."""

    parallel: Values
    recipe: str = "delayed"
    micro_batches: int = 1
    amax_group: str = "all"
    experts: bool = False
    dropout: float = 0.0
    recompute: str = "none"
    folder: str = "unused"
    warmup: int = 0
    smooth: bool = False

    @property
    def world(self) -> int:
        return int(np.prod([self.parallel.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")]))

    def config(self) -> RunConfig:
        """The run's configuration; its data section is never opened."""
        return build(RunConfig, {
            "run": {"dir": self.folder},
            "model": {
                "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_kv_heads": 2,
                "vocab_size": VOCAB, "max_sequence_length": LENGTH, "init_std": 0.1, "tied_embeddings": True,
                "hidden_dropout": self.dropout, "attention_dropout": self.dropout,
                **({"moe": EXPERTS} if self.experts else {}),
            },
            "data": {"train": [{"path": "unused"}], "tokenizer": "bytes", "sequence_length": LENGTH},
            "train": {
                "steps": STEPS, "global_batch": SAMPLES, "compile": "off",
                "micro_batch": SAMPLES // (self.micro_batches * self.parallel.get("dp", 1)),
                "recompute": self.recompute,
            },
            "optimizer": {"lr": 1e-3, "schedule": "constant", "min_lr": 1e-3},
            "precision": {
                "dtype": "fp32", "recipe": self.recipe, "emulation": "exact", "amax_group": self.amax_group,
                "warmup_steps": self.warmup, "smooth_swiglu": self.smooth,
                **({"options": {"amax_history_len": STEPS}} if self.recipe == "delayed" else {}),
            },
            "parallel": self.parallel,
        })  # fmt: skip

    def parts(self, world: int) -> Parts:
        torch.set_num_threads(1)
        config = self.config()
        mesh = make_mesh(config, world)
        loader = Samples(self.micro_batches, mesh.coord("dp"), mesh.size("dp"))
        return assemble(config, mesh, torch.device("cpu"), loader, corpus={"fingerprint": "0" * 64})


def fp8_state(parts: Parts) -> States:
    """Copies of all FP8 state of this rank."""
    return {name: t.clone() for name, t in tensors_of(parts)[0].items() if name.startswith("fp8.")}


@dataclasses.dataclass(frozen=True)
class Curve:
    """What a rank saw: losses and norms of all steps, FP8 state while the weights stood still and at the end."""

    losses: list[float]
    norms: list[float]
    frozen: States
    states: States
    coords: dict[str, int]


def curve(rank: int, world: int, setting: Setting) -> Curve:
    """`FROZEN` steps with a learning rate of 0, the others with 1e-3."""
    parts = setting.parts(world)
    results = [train_step(parts, step, 0.0) for step in range(1, FROZEN + 1)]
    frozen = fp8_state(parts)
    results += [train_step(parts, step, 1e-3) for step in range(FROZEN + 1, STEPS + 1)]
    assert all(result.finite for result in results)
    coords = {axis: parts.mesh.coord(axis) for axis in ("pp", "dp", "cp", "tp")}
    return Curve([r.loss for r in results], [r.grad_norm for r in results], frozen, fp8_state(parts), coords)


def curves(rank: int, world: int, settings: list[Setting]) -> list[Curve]:
    """Several settings in the same processes."""
    return [curve(rank, world, setting) for setting in settings]


MESHES: dict[str, Values] = {
    "pp2": {"pp": 2},
    "pp2-zb_v": {"pp": 2, "schedule": "zb_v"},
    "dp2": {"dp": 2},
    "dp2-optimizer": {"dp": 2, "dp_shard": "optimizer"},
    "dp2-full": {"dp": 2, "dp_shard": "full"},
    "cp2": {"cp": 2},
    "tp2": {"tp": 2},
    "tp2-whole": {"tp": 2, "sequence_parallel": False},
    "ep2": {"dp": 2, "ep": 2},
    "tp4": {"tp": 4},
    "pp2xtp2": {"pp": 2, "tp": 2},
    "cp2xtp2": {"cp": 2, "tp": 2},
}
QUICK = ("pp2", "dp2-optimizer", "cp2", "tp2", "ep2")


def meshes(*without: str) -> list[Any]:
    """The quick ones, then the others for `make test-all`."""
    names = [name for name in MESHES if name not in without]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in names]


KINDS: dict[str, Values] = {
    "delayed": {"recipe": "delayed"},
    "current": {"recipe": "current"},
    "mxfp8": {"recipe": "mxfp8"},
    "nvfp4": {"recipe": "nvfp4"},
    "wide": {"recipe": "none"},
    "dropout": {"recipe": "none", "dropout": 0.2},
}


@cache
def all_kinds(name: str) -> dict[str, list[Curve]]:
    """The curves of each kind on a mesh, by rank, made once; one process's with name "" (and "experts")."""
    parallel = MESHES.get(name, {})
    experts = "ep" in parallel or name == "experts"
    kinds = {kind: options for kind, options in KINDS.items() if (kind, name) != ("mxfp8", "tp4")}  # pieces of 16
    settings = [Setting(parallel, experts=experts, **options) for options in kinds.values()]
    return dict(zip(kinds, zip(*run_ranks(curves, settings[0].world, settings))))


def both(name: str, kind: str) -> tuple[list[Curve], Curve]:
    """The curves of a mesh's ranks and of one process."""
    return all_kinds(name)[kind], all_kinds("experts" if "ep" in MESHES[name] else "")[kind][0]


def _close(found: Curve, alone: Curve, steps: int, loss: float, norm: float) -> None:
    assert found.losses[:steps] == pytest.approx(alone.losses[:steps], rel=loss)
    assert found.norms[:steps] == pytest.approx(alone.norms[:steps], rel=norm)


@pytest.mark.parametrize("name", meshes())
def test_delayed_scaling_is_that_of_one_process(name: str) -> None:
    ranks, alone = both(name, "delayed")
    # 4 tp ranks share 2 kv heads: each quantizes its part of the gradient of k and v (docs/parallel.md)
    parts = name == "tp4"
    held: tuple[States, States] = {}, {}
    for found in ranks:
        _close(found, alone, 1, LOSS, NOISE_NORM if parts else NORM)
        _close(found, alone, FROZEN, FLIPPED, NOISE_NORM if parts else FLIPPED_NORM)
        _close(found, alone, STEPS, 2 * NOISE, 2 * NOISE_NORM)
        for mine, everyones in zip((found.frozen, found.states), held):
            for key, tensor in mine.items():
                assert torch.equal(tensor, everyones.setdefault(key, tensor)), f"{key} is not one on all ranks"
    assert held[0].keys() == held[1].keys() == alone.states.keys()
    for key, tensor in () if parts else alone.frozen.items():
        torch.testing.assert_close(held[0][key], tensor, rtol=FLIPPED_AMAX, atol=0, msg=key)
        if "history" in key:  # the first micro-batch's
            assert float(held[0][key][-FROZEN]) == pytest.approx(float(tensor[-FROZEN]), rel=NORM) != 0, key


@pytest.mark.parametrize("name", meshes())
def test_current_scaling_stays_within_the_noise_of_fp8(name: str) -> None:
    (ranks, alone), wide = both(name, "current"), both(name, "wide")[1]
    assert alone.losses[0] != pytest.approx(wide.losses[0], rel=1e-4)  # FP8 does something
    for found in ranks:
        assert not found.states
        if {"cp", "tp", "dp"} & MESHES[name].keys():
            _close(found, alone, FROZEN, NOISE, NOISE_NORM)
        else:  # a pipeline cuts no tensor
            _close(found, alone, FROZEN, LOSS, NORM)
        _close(found, alone, STEPS, 2 * NOISE, 2 * NOISE_NORM)


@pytest.mark.parametrize("name", meshes("tp4"))
def test_blocks_that_no_rank_cuts_give_the_codes_of_one_process(name: str) -> None:
    """MXFP8 on these shapes: every piece begins and ends with a block, only fp32 sums differ in order."""
    (ranks, alone), wide = both(name, "mxfp8"), both(name, "wide")[1]
    assert alone.losses[0] != pytest.approx(wide.losses[0], rel=1e-4)  # it does something
    for found in ranks:
        assert not found.states
        if "cp" in MESHES[name]:  # softmax in two parts: a code in 10^6 flips, and all codes once weights move
            _close(found, alone, FROZEN, FLIPPED, FLIPPED_NORM)
            _close(found, alone, STEPS, 2 * NOISE, 2 * NOISE_NORM)
        else:
            _close(found, alone, FROZEN, LOSS, NORM)
            _close(found, alone, STEPS, FLIPPED, FLIPPED_NORM)


@pytest.mark.parametrize("name", meshes())
def test_random_rounding_stays_within_its_noise(name: str) -> None:
    """NVFP4 draws other noise on every rank, and a pipeline draws that of one process."""
    (ranks, alone), wide = both(name, "nvfp4"), both(name, "wide")[1]
    assert alone.losses[0] != pytest.approx(wide.losses[0], rel=1e-3)
    for found in ranks:
        if MESHES[name].keys() <= {"pp", "schedule"}:
            _close(found, alone, STEPS, FLIPPED, FLIPPED_NORM)
        else:  # codes of 1 mantissa bit: 4 times the noise of E4M3's
            _close(found, alone, STEPS, 4 * NOISE, 4 * NOISE_NORM)


@pytest.mark.parametrize("name", meshes())
def test_dropout_masks_come_from_global_places(name: str) -> None:
    (ranks, alone), without = both(name, "dropout"), both(name, "wide")[1]
    assert min(abs(a - b) for a, b in zip(alone.losses, without.losses)) > 1e-3  # the masks do something
    for found in ranks:
        _close(found, alone, FROZEN, LOSS, NORM)
        _close(found, alone, STEPS, 10 * LOSS, 100 * NORM)  # AdamW's steps of what is all but 0; another mask: 1e-2


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_pipeline_with_recompute_and_accumulation(recipe: str) -> None:
    """TransformerEngine issue 539, Megatron-LM issue 607: together they gave NaN. Bit for bit one process without."""
    (alone,) = run_ranks(curve, 1, Setting({}, recipe, micro_batches=4))
    for found in run_ranks(curve, 2, Setting({"pp": 2}, recipe, micro_batches=4, recompute="full")):
        _close(found, alone, STEPS, 0.0 if recipe == "current" else LOSS, NORM)


@pytest.mark.parametrize("group", ["all", "tp"])
def test_who_shares_a_scale(group: str) -> None:
    """Replicas see other samples: with "tp" each has its own scales of activations, with "all" one for both."""
    ranks = run_ranks(curve, 4, Setting({"dp": 2, "tp": 2}, amax_group=group))
    by_place = {(found.coords["dp"], found.coords["tp"]): found.states for found in ranks}
    for replica in (0, 1):
        for name, tensor in by_place[replica, 0].items():
            assert torch.equal(tensor, by_place[replica, 1][name]), name
    inputs = [name for name in by_place[0, 0] if name.endswith("input.amax_history")]
    alike = [torch.equal(by_place[0, 0][name], by_place[1, 0][name]) for name in inputs]
    assert len(alike) == 16 and all(alike) == any(alike) == (group == "all")


def stopped(rank: int, world: int, setting: Setting) -> tuple[list[float], States]:
    """The same steps; the weights' and FP8's state goes through a checkpoint into new parts two before the end."""
    parts = setting.parts(world)
    losses = [train_step(parts, step, 0.0 if step <= FROZEN else 1e-3).loss for step in range(1, STEPS - 1)]
    save_run(parts, STEPS - 2, {})
    saved = fp8_state(parts)
    parts = setting.parts(world)
    found = load_newest_run(parts)
    assert found is not None and found[1]["step"] == STEPS - 2
    loaded = fp8_state(parts)
    assert loaded.keys() == saved.keys() and all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())
    losses += [train_step(parts, step, 1e-3).loss for step in (STEPS - 1, STEPS)]
    return losses, fp8_state(parts)


@pytest.mark.parametrize(
    ("parallel", "recipe"),
    [
        ({"pp": 2, "tp": 2}, "delayed"),
        ({"tp": 2}, "nvfp4"),  # no state, but noise that must be the same again
        pytest.param({"cp": 2, "dp": 2, "dp_shard": "optimizer"}, "delayed", marks=pytest.mark.slow),
    ],
    ids=["pp2xtp2", "tp2-nvfp4", "cp2xdp2"],
)
def test_state_resumes_bit_for_bit(parallel: Values, recipe: str, tmp_path: Any) -> None:
    setting = Setting(parallel, recipe=recipe, micro_batches=2, dropout=0.1, folder=str(tmp_path))
    straight = run_ranks(curve, setting.world, setting)
    for found, (losses, states) in zip(straight, run_ranks(stopped, setting.world, setting)):
        assert losses == found.losses
        assert states.keys() == found.states.keys()
        assert all(torch.equal(states[name], tensor) for name, tensor in found.states.items())


def test_every_mesh_is_one_that_a_run_accepts() -> None:
    for parallel in MESHES.values():
        setting = Setting(parallel, experts="ep" in parallel)
        assert check_run(setting.config(), setting.world) == []
