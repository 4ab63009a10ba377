"""One step of a small decoder in BF16, emulated FP8 and a backend's FP8, from the same values over the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megafp8.core.config import build
from megafp8.parallel.pieces import own_piece
from megafp8.train.config import RunConfig
from megafp8.train.setup import assemble, make_mesh
from megafp8.train.step import train_step
from tests.gpu.training import MarkovTokens

MODEL = {
    "family": "llama", "num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4,
    "num_kv_heads": 2, "vocab_size": 512, "max_sequence_length": 128,
}  # fmt: skip
STEPS = 2  # the second meets scales that the first has left
LOSS_UNIT = 2.0**-6  # of a loss near ln 512: four bf16 units, that many roundings lie between logits of both ways


def _config(**precision: Any) -> RunConfig:
    return build(
        RunConfig,
        {
            "run": {"dir": "unused"},
            "model": MODEL,
            "data": {"tokenizer": "bytes", "train": [{"path": "unused"}], "sequence_length": 128},
            "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 2, "compile": "off"},
            "optimizer": {"lr": 1e-7, "min_lr": 0.0, "schedule": "constant"},  # else Adam multiplies small differences
            "precision": {"dtype": "bf16", "warmup_steps": 1, **precision},
        },
    )


def _train(config: RunConfig, device: torch.device) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, by parameter, of the last of the steps."""
    mesh = make_mesh(config, 1)
    parts = assemble(config, mesh, device, MarkovTokens(config, STEPS))
    for step in range(1, STEPS + 1):
        result = train_step(parts, step, config.optimizer.lr)
    grads = {name: own_piece(param).grad.detach().double().cpu() for name, param in parts.named_parameters}
    return result.loss, grads


def model_checks(recipe: str, kind: str, device: torch.device) -> Iterator[tuple[str, float, float]]:
    """(what, error, bound) for this recipe on backend `kind`.

    Two ways of one recipe differ by summation order and so, here and there, by a code. Were all their codes' errors
    independent, their gradients would differ by sqrt(2) times the recipe's own noise, which is its distance from BF16;
    half a noise more is for chance.
    """
    bf16_loss, bf16 = _train(_config(), device)
    loss, want = _train(_config(recipe=recipe, backend="emulated", emulation="exact"), device)
    got_loss, got = _train(_config(recipe=recipe, backend=kind), device)
    yield "decoder: loss", abs(got_loss - loss) / loss, LOSS_UNIT
    yield "decoder: parameters missing or more", float(len(got.keys() ^ want.keys())), 0.0
    noise, norm = _distance(want, bf16), _norm(want)
    yield "decoder: gradient, against the recipe's noise", _distance(got, want) / norm, 2 * noise / norm
    yield "decoder: BF16 and FP8 differ, or nothing was quantized", -noise / norm, -1e-6
    yield "decoder: loss against BF16's", abs(got_loss - bf16_loss) / bf16_loss, 4 * LOSS_UNIT


def _distance(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    return sum(float((got[name] - want[name]).square().sum()) for name in want) ** 0.5


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in tensors.values()) ** 0.5
