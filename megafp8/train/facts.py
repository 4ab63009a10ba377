"""run.json: the code, the machine, and the constants that turn times into MFU."""

from __future__ import annotations

import platform
import sys
import time

import torch

from megafp8.core.jsonio import write_json
from megafp8.models.cost import flops_per_token, num_parameters
from megafp8.train.setup import Parts, code_version
from megafp8.train.telemetry import cpu_name


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
            "command": sys.argv,
            "mesh": {axis: parts.mesh.size(axis) for axis in ("pp", "dp", "cp", "tp", "ep")},
            "world_size": parts.mesh.world,
            "threads": torch.get_num_threads(),
            "peak_flops": peak[0],
            "peak_source": peak[1],
            "num_parameters": num_parameters(model),
            "flops_per_token_causal": flops_per_token(model, sequence, causal=True),
            "flops_per_token_full": flops_per_token(model, sequence, causal=False),
            "unigram_entropy_nats": parts.corpus["unigram_entropy_nats"],
            "train_tokens": parts.corpus["train_tokens"],
            "tokenizer": {k: parts.corpus[k] for k in ("kind", "fingerprint", "vocab_size", "path")},
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
    )


