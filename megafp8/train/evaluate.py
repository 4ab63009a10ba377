"""Validation: the same samples of each set every time, summed over ranks, no state touched."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from megafp8.core.errors import DataError
from megafp8.data.config import DatasetConfig, dataset_name
from megafp8.data.loader import Loader
from megafp8.data.sources import open_stream
from megafp8.parallel.collectives import all_reduce_
from megafp8.train.setup import Parts
from megafp8.train.step import to_device


@dataclass(frozen=True)
class EvalResult:
    """Mean loss in nats a target token, its exponential, and over how many tokens."""

    name: str
    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Evaluator:
    """Holds the open validation sets of a run."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sets = [(dataset_name(source), *self._open(source)) for source in parts.config.data.valid]

    def _open(self, source: DatasetConfig) -> tuple[Loader, int]:
        config = self._parts.config
        stream = open_stream(
            source.path,
            tokenizer=self._parts.tokenizer,
            sequence_length=config.data.sequence_length,
            seed=0,
        )
        if stream.num_samples < 1:
            raise DataError(
                f"{source.path}: shorter than one sequence of {config.data.sequence_length} tokens; "
                "shorten data.sequence_length or validate on more text"
            )
        loader = Loader(
            stream,
            micro_batch=config.train.micro_batch,
            global_batch=config.train.micro_batch,
            dp_rank=0,
            dp_size=1,
            eod_id=self._parts.tokenizer.eod_id,
            document_mask=config.data.document_mask,
            mask_eod_loss=config.data.mask_eod_loss,
            vocab_size=config.model.vocab_size,
        )
        return loader, min(config.train.eval_samples, stream.num_samples)

    @torch.no_grad()
    def __call__(self) -> list[EvalResult]:
        """Evaluate on every validation set; results are equal on all ranks. Collective over dp."""
        self._parts.model.eval()
        results = [self._evaluate(name, loader, count) for name, loader, count in self._sets]
        self._parts.model.train()
        return results

    def _evaluate(self, name: str, loader: Loader, num_samples: int) -> EvalResult:
        parts, step = self._parts, loader.micro_batch
        mine = np.arange(parts.mesh.coord("dp"), num_samples, parts.mesh.size("dp"), dtype=np.int64)
        totals = torch.zeros(2, dtype=torch.float64)
        for start in range(0, len(mine), step):
            batch = to_device(loader.batch(mine[start : start + step]), parts.device)
            loss_sum, count = parts.model(
                batch.tokens, batch.targets, segment_ids=batch.segment_ids, positions=batch.positions
            )
            totals += torch.tensor([float(loss_sum), float(count)], dtype=torch.float64)
        all_reduce_(totals, parts.mesh.group("dp"))
        return EvalResult(name, float(totals[0] / totals[1]), int(totals[1]))
