"""run.json: the code, the machine, and the constants that turn times into MFU."""

from __future__ import annotations

import platform
import sys
import time
from typing import Any

import torch

from megafp8.core.jsonio import write_json
from megafp8.core.log import redact
from megafp8.models.config import quantizable_shapes
from megafp8.models.cost import flops_per_token, num_parameters
from megafp8.nn.precision import plan_gemms
from megafp8.train.config import RunConfig
from megafp8.train.setup import Parts, code_version
from megafp8.train.telemetry import cpu_name


def precision_counts(config: RunConfig) -> dict[str, Any]:
    """How much of the layers runs in FP8; empty for a run in which nothing does.

    Returns:
        "gemms": the GEMMs of a micro-batch in the layers' linears, three each (fprop, dgrad, wgrad), an expert layer's
        grouped ones counted once; "fp8_gemms": those in FP8; "recipes": linears by recipe; "not_fp8": the names of the
        other linears.
    """
    names = list(quantizable_shapes(config.model))
    plan, _ = plan_gemms(config.precision, names, config.model.num_layers)
    recipes: dict[str, int] = {}
    for recipe in plan.values():
        if recipe != "none":
            recipes[recipe] = recipes.get(recipe, 0) + 1
    if not recipes:
        return {}
    not_fp8 = [name for name in names if plan[name] == "none"]
    return {"gemms": 3 * len(names), "fp8_gemms": 3 * sum(recipes.values()), "recipes": recipes, "not_fp8": not_fp8}


def write_facts(parts: Parts, peak: tuple[float, str]) -> None:
    """Write run.json; `peak` is what `telemetry.peak_flops` found."""
    config, model, sequence = parts.config, parts.config.model, parts.config.data.sequence_length
    write_json(
        config.dir / "run.json",
        {
            "name": config.name,
            "code_version": code_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name(parts.device) if parts.device.type == "cuda" else "cpu",
            "cpu": cpu_name(),
            "command": [redact(word) for word in sys.argv],
            "mesh": {axis: parts.mesh.size(axis) for axis in ("pp", "dp", "cp", "tp", "ep")},
            "world_size": parts.mesh.world,
            "threads": torch.get_num_threads(),
            "peak_flops": peak[0],
            "peak_source": peak[1],
            "num_parameters": num_parameters(model),
            "flops_per_token_causal": flops_per_token(model, sequence, causal=True),
            "flops_per_token_full": flops_per_token(model, sequence, causal=False),
            "unigram_entropy_nats": parts.corpus["unigram_entropy_nats"],
            "fp8": precision_counts(config),
            "train_tokens": parts.corpus["train_tokens"],
            "tokenizer": {k: parts.corpus[k] for k in ("kind", "fingerprint", "vocab_size", "path")},
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
    )
