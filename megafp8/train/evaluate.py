"""Validation: the same samples of each set every time, summed over ranks, no state touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from megafp8.core import faults
from megafp8.core.errors import DataError
from megafp8.core.heartbeat import HEART
from megafp8.data.config import DatasetConfig, dataset_name
from megafp8.data.loader import IGNORED, Batch, Loader
from megafp8.data.sources import open_stream
from megafp8.parallel.collectives import all_reduce_
from megafp8.train.setup import Parts
from megafp8.train.step import to_device, wire_of


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
        assert parts.tokenizer is not None, "evaluation reads text"
        self._parts, self._tokenizer = parts, parts.tokenizer
        self._sets = [(dataset_name(source), *self._open(source)) for source in parts.config.data.valid]

    def _open(self, source: DatasetConfig) -> tuple[Loader, int]:
        config = self._parts.config
        stream = open_stream(
            source.path,
            tokenizer=self._tokenizer,
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
            eod_id=self._tokenizer.eod_id,
            document_mask=config.data.document_mask,
            mask_eod_loss=config.data.mask_eod_loss,
            vocab_size=config.model.vocab_size,
        )
        return loader, min(config.train.eval_samples, stream.num_samples)

    @torch.no_grad()
    def __call__(self, put_off: Callable[[], bool] = lambda: False) -> list[EvalResult] | None:
        """Evaluate on every validation set; results are equal on all ranks. Collective over all of them.

        Args:
            put_off: asked now and then, and by all ranks alike, whether to leave it for later; then None comes back.
        """
        for stage in self._parts.stages:
            stage.eval()
        results: list[EvalResult] = []
        for name, loader, count in self._sets:
            result = self._evaluate(name, loader, count, put_off)
            if result is None:
                break
            results.append(result)
        for stage in self._parts.stages:
            stage.train()
        return results if len(results) == len(self._sets) else None

    def _evaluate(self, name: str, loader: Loader, num_samples: int, put_off: Callable[[], bool]) -> EvalResult | None:
        parts, totals = self._parts, torch.zeros(2, dtype=torch.float64)
        at_once = 4 * parts.mesh.size("pp")  # micro-batches under way: enough to fill a pipeline, few to hold
        numbers = list(self._numbers(num_samples, loader.micro_batch))
        for start in range(0, len(numbers), at_once):
            if put_off():
                return None
            batches = [self._batch(loader, ids, num_samples) for ids in numbers[start : start + at_once]]
            passes = _Forward(parts, batches)
            parts.pipeline.run(passes, len(passes.batches), wire_of(parts, passes.batches[0]), forward_only=True)
            totals += passes.totals
        all_reduce_(totals, parts.mesh.group_of(("pp", "dp", "cp")))
        return EvalResult(name, float(totals[0] / totals[1]), int(totals[1]))

    def _numbers(self, num_samples: int, micro_batch: int) -> Iterator[np.ndarray]:
        """Numbers of this replica's samples, a micro-batch each; as many on every replica, which experts share.

        Numbers from `num_samples` on stand for nothing.
        """
        dp = self._parts.mesh.size("dp")
        rows = -(-num_samples // (dp * micro_batch)) * micro_batch
        mine = self._parts.mesh.coord("dp") + dp * np.arange(rows, dtype=np.int64)
        for start in range(0, rows, micro_batch):
            yield mine[start : start + micro_batch]

    def _batch(self, loader: Loader, numbers: np.ndarray, num_samples: int) -> Batch:
        batch = loader.batch(np.minimum(numbers, num_samples - 1))
        real = torch.from_numpy(numbers < num_samples)[:, None]
        return to_device(replace(batch, targets=batch.targets.where(real, IGNORED)), self._parts.device)


class _Forward:
    """Forward passes for the pipeline to call; `totals` are summed loss and number of targets, fp64."""

    def __init__(self, parts: Parts, batches: list[Batch]) -> None:
        self._stages = dict(zip(parts.pipeline.stages, parts.stages, strict=True))
        self.batches, self.totals = batches, torch.zeros(2, dtype=torch.float64)

    def forward(self, stage: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        HEART.beat()
        faults.at("evaluation")
        batch = self.batches[micro_batch]
        result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self._stages[stage](
            batch.tokens, batch.targets, segment_ids=batch.segment_ids, positions=batch.positions, hidden=hidden
        )
        if isinstance(result, torch.Tensor):
            return result
        self.totals += torch.tensor([float(value) for value in result], dtype=torch.float64)
        return result[0]

    def split(self, backward: Callable[[], None]) -> Callable[[], None]:
        raise AssertionError("an evaluation has no backward pass")

    def after_backward(self, stage: int, micro_batch: int) -> None:
        raise AssertionError("an evaluation has no backward pass")
