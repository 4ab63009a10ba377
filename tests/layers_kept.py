"""Bytes that a decoder layer keeps, measured on a model and by the formula, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megafp8.models import ModelConfig, build
from megafp8.models.activations import Workload, activation_bytes, checkpoint_of_layer
from megafp8.nn.dropout import DropoutKey
from megafp8.nn.recompute import RecomputePlan
from megafp8.parallel.mesh import Mesh
from tests.kept import kept_bytes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def layer_bytes(values: dict[str, Any], work: Workload, mesh: Mesh | None = None) -> tuple[int, int]:
    """(measured, formula): what a model of two layers keeps more than one of one layer."""
    kept = []
    for layers in (1, 2):
        config = ModelConfig(**values, num_layers=layers, max_sequence_length=work.sequence_length)
        model = build(
            config,
            mesh=mesh,
            dtype=DTYPES[work.precision.dtype],
            precision=replace(work.precision, emulation="exact"),  # codes of one byte, as hardware has them
            recompute=RecomputePlan(work.recompute, work.recompute_layers, work.recompute_modules),  # type: ignore[arg-type]
        )
        shape = (work.micro_batch, work.sequence_length)
        tokens = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        key = DropoutKey(1, torch.arange(work.micro_batch)) if model.has_dropout else None

        def forward(model: Any = model, tokens: torch.Tensor = tokens, key: Any = key) -> Any:
            return model(tokens, tokens, dropout=key, num_sequences=len(tokens))

        if model.fp8_states or layers == 1:
            forward()  # what is made once: quantized weights, masks that are cached
        kept.append(kept_bytes(forward))
    formula = checkpoint_of_layer(config, work) if work.recompute == "full" else activation_bytes(config, 0, work)
    return kept[1] - kept[0], formula
