"""A run's model for judging in the arithmetic that trained it: FP8 recipe, scales and all, on one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megafp8.checkpoint import find, load, read_meta
from megafp8.core.config import build
from megafp8.core.errors import CheckpointError, ConfigError
from megafp8.data.loader import Batch
from megafp8.data.marks import Marks
from megafp8.data.tokenizer import load_tokenizer
from megafp8.infer.weights import Loaded, tokenizer_path
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.train.config import RunConfig
from megafp8.train.fp8_state import restore_warmup
from megafp8.train.setup import assemble
from megafp8.train.state import tensors_of


@dataclass
class _NoFeed:
    """A run's parts want a feed; judging takes no step."""

    consumed_samples: int = 0
    global_batch: int = 1

    def next_step(self) -> list[Batch]:
        raise AssertionError("a model that is judged is not trained")


def load_as_trained(path: Path | str, *, tokenizer: str | Path | None = None) -> Loaded:
    """Load a checkpoint, or the newest complete one of a run, into the layers that trained it.

    Amax history and scales come from the checkpoint and stay as they are: nothing here touches state.

    Raises:
        CheckpointError: none there, damaged, or its configuration is not of this version.
        DataError: the tokenizer is missing or another one.
    """
    path = find(path)
    spec = tokenizer_path(path, tokenizer)
    try:
        config = build(RunConfig, read_meta(path)["config"])
    except (ConfigError, KeyError) as error:
        lines = "; ".join(str(error).splitlines())
        raise CheckpointError(f"{path}: its configuration is not one of this version's runs: {lines}") from error
    train = replace(config.train, recompute="none", recompute_layers=0)
    config = replace(config, parallel=ParallelConfig(), train=train)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh = Mesh.single()
    parts = assemble(config, mesh, device, _NoFeed())
    tensors, layouts = tensors_of(parts)
    meta = load(path, tensors, layouts, mesh)
    parts.optimizer.load_done()
    restore_warmup(parts, meta)
    for state in parts.fp8_states.values():
        state.drop_weight_cache()
    (model,) = parts.stages
    marks = Marks.of(meta.get("tokenizer") or {})
    return Loaded(path, model.eval(), config.model, load_tokenizer(spec), config.data.sequence_length, marks)
