"""Micro-batches for one data-parallel rank; the whole state is one integer, `consumed_samples`.

Sample numbers consumed + m * (micro_batch * dp_size) + rank * micro_batch + b go to micro-batch m, row b of a rank:
the set of samples in a step does not depend on dp_size, nor does any sample's number on the run's length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megafp8.core.errors import ConfigError, DataError
from megafp8.data.batch_size import BatchSize, batch_problems
from megafp8.data.blend import Samples
from megafp8.data.config import DataConfig, DatasetConfig

IGNORED = -100  # a target without loss

Skips = tuple[tuple[int, int], ...]  # (at, samples): before the run's sample `at`, so many of the source are left out


@dataclass(frozen=True)
class Batch:
    """One micro-batch, int64 on the CPU.

    Attributes:
        tokens: [B, S] inputs.
        targets: [B, S] the next tokens; -100 carries no loss.
        sample_ids: [B] numbers of the samples in the run.
        segment_ids: [B, S] number of the document within the sample, or None without document mask.
        positions: [B, S] position within the document, or None without document mask.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    sample_ids: torch.Tensor
    segment_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None


def segments(tokens: np.ndarray, eod_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Document numbers and positions inside the document, both int64 like `tokens` [B, S].

    A document ends with (and includes) `eod_id`; a sample's first piece counts from 0 wherever it was cut.
    """
    ends = tokens == eod_id
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    index = np.arange(tokens.shape[1], dtype=np.int64)
    last_start = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return np.cumsum(starts, axis=1, dtype=np.int64), index - last_start


class Loader:
    """Serves the micro-batches of each step.

    Args:
        source: a Blend or SampleStream.
        micro_batch: samples in a micro-batch of one rank.
        global_batch: samples in a step of all ranks; a BatchSize may ramp up.
        dp_rank, dp_size: which share of a step is ours.
        consumed_samples: where to start; the number of samples all ranks have consumed.
        eod_id: the id that ends a document.
        document_mask: give segment_ids and positions.
        mask_eod_loss: no loss where the input is `eod_id` (the target belongs to the next document).
        vocab_size: ids from here on are refused, 0: not checked.

    Raises:
        ConfigError: a global batch is no multiple of micro_batch * dp_size.
    """

    def __init__(
        self,
        source: Samples,
        *,
        micro_batch: int,
        global_batch: int | BatchSize,
        dp_rank: int,
        dp_size: int,
        eod_id: int,
        consumed_samples: int = 0,
        document_mask: bool = False,
        mask_eod_loss: bool = False,
        vocab_size: int = 0,
    ) -> None:
        batches = global_batch if isinstance(global_batch, BatchSize) else BatchSize(global_batch)
        problems = batch_problems(batches.full, batches.ramp, dp=dp_size, micro_batch=micro_batch)
        if problems:
            raise ConfigError("\n".join(problems))
        assert 0 <= dp_rank < dp_size and consumed_samples >= 0
        self.source, self.micro_batch, self.batches = source, micro_batch, batches
        self.dp_rank, self.dp_size, self.consumed_samples = dp_rank, dp_size, consumed_samples
        self.eod_id, self.document_mask, self.mask_eod_loss = eod_id, document_mask, mask_eod_loss
        self.vocab_size = vocab_size
        self.skips: Skips = ()

    @property
    def global_batch(self) -> int:
        """Samples of the next step over all ranks; a pure function of `consumed_samples`."""
        return self.batches.at(self.consumed_samples)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of this rank in the next step."""
        return self.global_batch // (self.micro_batch * self.dp_size)

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step; advances `consumed_samples` by the global batch."""
        global_batch, batches = self.global_batch, []
        for number in range(self.num_micro_batches):
            start = self.consumed_samples + (number * self.dp_size + self.dp_rank) * self.micro_batch
            batches.append(self.batch(self.numbers(start, start + self.micro_batch)))
        self.consumed_samples += global_batch
        return batches

    def numbers(self, start: int, stop: int) -> np.ndarray:
        """The source's numbers (int64) of the run's samples [start, stop): the same but for what `skips` leaves out."""
        own = np.arange(start, stop, dtype=np.int64)
        return own + sum((np.where(own >= at, samples, 0) for at, samples in self.skips), np.zeros_like(own))

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """The samples of these numbers (int64) as one micro-batch; `consumed_samples` stays.

        Raises:
            DataError: a token id that the vocabulary does not have.
        """
        ids = np.stack([self.source.sample(int(number)) for number in sample_ids])
        if self.vocab_size and (ids.max() >= self.vocab_size or ids.min() < 0):
            row = int(np.argmax((ids >= self.vocab_size).any(axis=1) | (ids < 0).any(axis=1)))
            bad = ids[row][(ids[row] >= self.vocab_size) | (ids[row] < 0)][0]
            raise DataError(
                f"sample {sample_ids[row]} holds token id {bad}, but the vocabulary has {self.vocab_size} ids; "
                "the data is of another tokenizer, see `megafp8 data verify`"
            )
        tokens, targets = ids[:, :-1], ids[:, 1:]
        segment_ids = positions = None
        if self.document_mask:
            segment_ids, positions = (torch.from_numpy(part) for part in segments(tokens, self.eod_id))
        if self.mask_eod_loss:
            targets = np.where(tokens == self.eod_id, IGNORED, targets)
        return Batch(
            torch.from_numpy(np.ascontiguousarray(tokens)),
            torch.from_numpy(np.ascontiguousarray(targets)),
            torch.from_numpy(sample_ids),
            segment_ids,
            positions,
        )


__all__ = ["IGNORED", "Batch", "DataConfig", "DatasetConfig", "Loader", "segments"]
