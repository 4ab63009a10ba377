"""Bugs of other codebases in initial values, decay groups, accumulation and batches, tried here (docs/cases.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megafp8.core.errors import ConfigError
from megafp8.core.layout import layout_of
from megafp8.optim.adamw import decays
from megafp8.optim.config import OptimizerConfig
from megafp8.train import state
from megafp8.train.config import check_run
from megafp8.train.state import load_newest_run, save_run, tensors_of
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import differences, make_parts, run_config, train_each, whole

MODEL = {
    "attention_bias": True,
    "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "first_dense_layers": 1, "num_shared_experts": 1},
}
DENSE = {"attention_bias": True, "mlp_bias": True, "tied_embeddings": True}
MESHES: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"dp": 4, "ep": 2, "dp_shard": "optimizer"},
    {"dp": 2, "tp": 2, "dp_shard": "full"},
]  # fmt: skip
MASTER = "optimizer.master."


def masters(parts: Any) -> dict[str, np.ndarray]:
    tensors, layouts = tensors_of(parts)
    named = {name: tensor for name, tensor in tensors.items() if name.startswith(MASTER)}
    return {name.removeprefix(MASTER): t for name, t in whole(named, layouts, parts.mesh).items()}


def before_and_after(rank: int, world: int, sections: dict[str, Any], meshes: list[dict[str, Any]]) -> list[Any]:
    """Whole masters as they are built, and after a step on zero gradients, at rate 1e-2 with decay 0.1."""
    found = []
    for mesh in meshes:
        config = run_config(parallel=mesh, **sections)
        parts = make_parts(config, world)
        before = masters(parts)
        parts.buckets.zero_()
        parts.buckets.finish()
        parts.optimizer.step(1e-2)
        parts.optimizer.wait()
        found.append((before, masters(parts)))
    return found


@pytest.mark.parametrize("optimizer, model", [
    ({"name": "adamw"}, MODEL), ({"name": "muon", "decay_embeddings": False}, DENSE),
])  # fmt: skip
def test_decay_touches_what_it_should_and_initial_values_are_one_process(optimizer: Any, model: Any) -> None:
    """R102, R094. Norms and biases stay, every other matrix shrinks by exactly lr x weight_decay."""
    sections = {"model": model, "optimizer": optimizer | {"weight_decay": 0.1}}
    ((alone, _),) = run_ranks(before_and_after, 1, sections, [{}])[0]
    meshes = MESHES if "moe" in model else [mesh for mesh in MESHES if "ep" not in mesh]
    for before, after in run_ranks(before_and_after, 4, sections, meshes)[0]:
        assert before.keys() == alone.keys()
        for name, values in before.items():
            assert np.array_equal(values, alone[name]), f"{name} begins with other values than on one process"
            kept = "norm" in name or name.endswith("bias")
            kept |= name == "embedding.weight" and not optimizer.get("decay_embeddings", True)
            factor = 1.0 if kept else 1 - 1e-2 * 0.1
            np.testing.assert_allclose(after[name], values * factor, rtol=4 * 2**-53, atol=0, err_msg=name)
    halves = np.split(alone["layers.0.attention.out.weight"], 2, axis=1)
    assert not np.array_equal(*halves) and np.std(halves[0]) == pytest.approx(np.std(halves[1]), rel=0.2)


@pytest.mark.parametrize("pp", [1, 2])
def test_accumulation_does_not_change_a_step(pp: int) -> None:
    """R098, R100: the same 8 samples in 1 to 8 micro-batches, with and without a pipeline."""
    configs = [run_config(parallel={"pp": pp}, train={"micro_batch": size}) for size in (8, 4, 2, 1)]
    whole_batch, *others = run_ranks(train_each, pp, configs)[0]
    for got in others:
        # sums of 10^3 terms in another order; AdamW divides small gradients by themselves
        assert got["losses"] == pytest.approx(whole_batch["losses"], rel=1e-12)
        assert got["norms"] == pytest.approx(whole_batch["norms"], rel=1e-11)
        assert max(differences(got["state"], whole_batch["state"]).values()) < 1e-10


@pytest.mark.parametrize("train, says", [
    ({"global_batch": 0}, "global_batch: 0 is refused: input should be greater than 0"),
    ({"micro_batch": 0}, "micro_batch: 0 is refused: input should be greater than 0"),
    ({"micro_batch": -2}, "micro_batch: -2 is refused"),
    ({"micro_batch": 16}, "global_batch 8 is not divisible by dp 2 x train.micro_batch 16; nearest: 32"),
    ({"micro_batch": 3}, "global_batch 8 is not divisible by dp 2 x train.micro_batch 3; nearest: 6, 12"),
])  # fmt: skip
def test_batches_that_do_not_fit_are_refused_by_their_values(train: dict[str, int], says: str) -> None:
    """R110: before any process starts."""
    with pytest.raises(ConfigError) as caught:
        problems = check_run(run_config(train=train), 2)
        raise ConfigError("\n".join(problems))
    assert says in str(caught.value)


class Watched(dict[str, Any]):
    """Remembers what was looked at."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


def test_what_a_checkpoint_says_is_read_back(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """R011: every number of the trainer is used at resume; the rest is there for people."""
    parts = make_parts(run_config(run={"dir": str(tmp_path)}), 1)
    parts.corpus = {"fingerprint": "0" * 64}
    parts.loader.consumed_samples = 24
    parts.optimizer.step_count = 3
    save_run(parts, 3, {"productive_seconds": 1.0})
    load_newest = state.load_newest
    monkeypatch.setattr(state, "load_newest", lambda *a, **k: (lambda f: (f[0], Watched(f[1])))(load_newest(*a, **k)))
    again = make_parts(run_config(run={"dir": str(tmp_path)}), 1)
    again.corpus = parts.corpus
    found = load_newest_run(again)
    assert found is not None
    meta = found[1]
    assert meta["step"] == 3  # the loop's own look
    assert (again.loader.consumed_samples, again.optimizer.step_count) == (24, 3)
    assert set(meta) - meta.seen == {"code_version", "productive_seconds"}


def test_decay_is_by_kind_and_by_choice() -> None:
    """R102: norms and biases by one setting, embeddings (tied output weights) by another, all else always."""
    parts = make_parts(run_config(model=MODEL | {"tied_embeddings": True}), 1)
    for spared in (True, False):
        config = OptimizerConfig(decay_norms_biases=not spared, decay_embeddings=not spared)
        for name, param in parts.named_parameters:
            special = "norm" in name or name.endswith("bias") or name == "embedding.weight"
            assert decays(name, layout_of(param), config) == (not (special and spared)), name
