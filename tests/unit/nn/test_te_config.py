"""What keeps Transformer Engine's layers from being used is said before anything starts, with the way out."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest

from megafp8.nn.precision import PrecisionConfig, backend_problems
from megafp8.nn.te_config import TEConfig, installed_problem, te_problems
from megafp8.train.config import check_run
from tests.distributed.small_run import run_config

FINE: dict[str, Any] = {
    "recompute": "none", "recompute_modules": ("norm", "activation"), "full_shard": False, "pipeline": False,
    "experts": False, "sequence_parallel": True, "reduces_amax": True, "even_vocabulary": True, "tp_first": True,
    "statistics": False,
}  # fmt: skip


def install(monkeypatch: pytest.MonkeyPatch, version: str | None, compiled: bool = True) -> None:
    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if compiled else None)


@pytest.mark.parametrize(
    ("version", "compiled", "said"),
    [
        (None, True, "is not installed (pip install"),
        ("1.13.0", True, "is 1.13.0 and at least 2.20 is needed"),
        ("2.9.0+cu12", True, "is 2.9.0+cu12 and at least 2.20 is needed"),
        ("2.20.2", False, "2.20.2 is here without its compiled part for PyTorch (pip install"),
    ],
)
def test_a_library_that_does_not_serve(
    version: str | None, compiled: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, version, compiled)
    [problem] = backend_problems(PrecisionConfig(recipe="current", backend="te"))
    assert problem == installed_problem() and said in problem
    assert problem.startswith("precision.backend = 'te': ") and "use auto" in problem and "\n" not in problem
    assert backend_problems(PrecisionConfig(recipe="current")) == []


def test_a_library_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "2.20.2+abc")
    assert backend_problems(PrecisionConfig(recipe="current", backend="te")) == []
    install(monkeypatch, "3.0")
    assert backend_problems(PrecisionConfig(backend="te")) == []
    [problem] = backend_problems(PrecisionConfig(backend="te", dtype="fp64"))
    assert "no fp64" in problem and "bf16" in problem
    mixed = PrecisionConfig(recipe="current", backend="te", patterns={"attention": "mxfp8", "down": "none"})
    [problem] = backend_problems(mixed)
    assert "current, mxfp8" in problem and "take one" in problem


@pytest.mark.parametrize(
    ("options", "facts", "said"),
    [
        ({}, {"recompute": "selective"}, "train.recompute_modules norm, activation"),
        ({}, {"full_shard": True}, "use dp_shard = 'optimizer'"),
        ({}, {"statistics": True}, "log.fp8_interval = 0"),
        ({}, {"reduces_amax": False}, "use reduce_amax = true"),
        ({"ub_overlap": True}, {"sequence_parallel": False}, "or ub_overlap = false"),
        ({"ub_overlap": True}, {"tp_first": False}, "put tp first in parallel.order"),
        ({"cuda_graphs": True}, {"pipeline": True}, "or cuda_graphs = false"),
        ({"cuda_graphs": True}, {"recompute": "full"}, "no recompute"),
        ({"cuda_graphs": True}, {"experts": True}, "no experts"),
        ({"cross_entropy": True}, {"even_vocabulary": False}, "a multiple of parallel.tp"),
    ],
)
def test_what_a_run_may_not_be(options: dict[str, Any], facts: dict[str, Any], said: str) -> None:
    assert te_problems(TEConfig(**options), **FINE) == []
    [problem] = te_problems(TEConfig(**options), **{**FINE, **facts})
    assert said in problem and "\n" not in problem


def test_a_run_hears_of_all_of_it_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    config = run_config(
        precision={"dtype": "bf16", "recipe": "delayed", "backend": "te", "options": {"reduce_amax": False}},
        parallel={"tp": 2, "dp_shard": "full"}, train={"recompute": "selective"},
    )  # fmt: skip
    config = replace(config, log=replace(config.log, fp8_interval=5))
    lines = "\n".join(check_run(config, 2))
    for said in ("is not installed", "recompute_modules", "dp_shard = 'full'", "log.fp8_interval", "reduce_amax"):
        assert said in lines, said


def test_what_is_fine() -> None:
    only_core = {"recompute": "selective", "recompute_modules": ("core_attention",)}
    assert te_problems(TEConfig(), **{**FINE, **only_core}) == []
    assert te_problems(TEConfig(), **{**FINE, "recompute": "full", "pipeline": True, "experts": True}) == []
    assert te_problems(TEConfig(), **{**FINE, "sequence_parallel": False, "reduces_amax": False}) == []
