"""What a step is: forward and backward of every micro-batch, one norm, one update."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from megafp8.core.rng import seed_for
from megafp8.data.loader import Batch
from megafp8.fp8.linear import update_states
from megafp8.nn.layers import DropoutKey
from megafp8.optim.clip import clip_scale, grad_norm
from megafp8.parallel.collectives import all_reduce_
from megafp8.train.setup import Parts


@dataclass(frozen=True)
class StepResult:
    """What came of a step, equal on all ranks: mean loss (nats a target token), gradient norm, targets, sequences."""

    loss: float
    grad_norm: float
    target_tokens: int
    num_sequences: int
    finite: bool


def train_step(parts: Parts, step: int, learning_rate: float) -> StepResult:
    """Take one optimizer step; skipped on every rank alike if the loss or the gradient is not finite."""
    num_sequences = parts.loader.global_batch
    batches = [to_device(batch, parts.device) for batch in parts.loader.next_step()]
    target_tokens = count_targets(parts, batches)
    parts.model.train()
    parts.buckets.zero_(contributions=len(batches))
    loss = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss += forward_backward(parts, batch, step, num_sequences, scale=1.0 / target_tokens)
        update_states(parts.fp8_states.values(), parts.mesh.group_of(("dp", "cp", "tp")))
    parts.buckets.finish()
    loss /= target_tokens
    all_reduce_(loss, parts.mesh.group("dp"))
    norm = grad_norm(parts.named_parameters, parts.mesh)
    finite = norm.finite and bool(torch.isfinite(loss))
    if finite:
        parts.optimizer.step(learning_rate, grad_scale=clip_scale(norm.value, parts.config.optimizer.clip_grad))
        for state in parts.fp8_states.values():
            state.drop_weight_cache()
    return StepResult(float(loss), norm.value, target_tokens, num_sequences, finite)


def forward_backward(parts: Parts, batch: Batch, step: int, num_sequences: int, *, scale: float) -> torch.Tensor:
    """One micro-batch of a step of `num_sequences`: gradients of loss sum x scale.

    Returns:
        its loss sum, fp64 on the CPU.
    """
    loss_sum, _ = parts.model(
        batch.tokens,
        batch.targets,
        loss_scale=scale,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        dropout=dropout_key(parts, batch, step),
        num_sequences=num_sequences,
    )
    (loss_sum * scale).backward()
    return loss_sum.detach().to("cpu", torch.float64)


def dropout_key(parts: Parts, batch: Batch, step: int) -> DropoutKey | None:
    """Seed and sample numbers from which masks come: the same on any mesh."""
    if not parts.model.has_dropout:
        return None
    return DropoutKey(seed_for(parts.config.run.seed, "dropout", step), batch.sample_ids)


def count_targets(parts: Parts, batches: list[Batch]) -> int:
    """Target tokens of the global batch: what every loss and gradient of the step is divided by."""
    count = torch.tensor(sum(int((batch.targets >= 0).sum()) for batch in batches), dtype=torch.int64)
    all_reduce_(count, parts.mesh.group("dp"))
    return max(1, int(count))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the rank's device; the batch itself on a CPU."""
    if device.type == "cpu":
        return batch
    present = {f.name: getattr(batch, f.name) for f in fields(batch) if getattr(batch, f.name) is not None}
    return Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in present.items()})
