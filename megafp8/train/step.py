"""What a step is: forward and backward of every micro-batch, one norm, one update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from megafp8.core import faults
from megafp8.core.heartbeat import HEART
from megafp8.core.rng import seed_for
from megafp8.data.loader import Batch
from megafp8.fp8.linear import begin_step as begin_fp8_step
from megafp8.fp8.linear import update_states
from megafp8.fp8.rollback import Before
from megafp8.nn.balance import begin_step, update_balance
from megafp8.nn.deferred import WeightGrads, deferring
from megafp8.nn.layers import DropoutKey
from megafp8.optim.clip import clip_scale, grad_norm
from megafp8.parallel.collectives import all_reduce_
from megafp8.parallel.pipeline import Wire
from megafp8.train.nonfinite import Finding, Watch, first_nonfinite
from megafp8.train.setup import Parts


@dataclass(frozen=True)
class StepResult:
    """What came of a step, equal on all ranks: mean loss (nats a target token), gradient norm, targets, sequences.

    `origin`: where a step that is not finite broke; None where it did not do so again. `own_loss`: this rank's part of
    the summed loss. `taken`: whether the optimizer took it. `recomputed`: the first result was not finite.
    """

    loss: float
    grad_norm: float
    target_tokens: int
    num_sequences: int
    finite: bool
    origin: Finding | None = None
    own_loss: float = 0.0
    taken: bool = True
    recomputed: bool = False


Judge = Callable[[int, StepResult, Callable[[], StepResult]], StepResult | None]


@dataclass(frozen=True)
class Gradients:
    """What `gradients` leaves beside every `param.main_grad`, equal on all ranks but `own_loss`."""

    loss: torch.Tensor
    target_tokens: int
    num_sequences: int
    own_loss: float


def train_step(parts: Parts, step: int, learning_rate: float, judge: Judge | None = None) -> StepResult:
    """Take one optimizer step; skipped on every rank alike, without a trace, if loss or gradient is not finite.

    `judge` looks at a finite result before it is taken, may have it computed again, and gives the one to take, or None.
    """
    batches = next_batches(parts)
    before = Before(parts.fp8_states.values())
    result = _computed(parts, step, batches)
    if not result.finite:
        origin = _origin(parts, step, batches, before)
        if origin is None and parts.config.guard.rerun_suspicious:
            result = replace(_computed(parts, step, batches), recomputed=True)
        if not result.finite:
            return replace(result, taken=False, origin=origin)
    if judge is not None:

        def again() -> StepResult:
            before.restore()
            return _computed(parts, step, batches)

        judged = judge(step, result, again)
        if judged is None:
            before.restore()
            return replace(result, taken=False)
        result = judged
    faults.at("optimizer")
    parts.optimizer.step(learning_rate, grad_scale=clip_scale(result.grad_norm, parts.config.optimizer.clip_grad))
    update_balance(parts.routers, parts.mesh)
    for state in parts.fp8_states.values():
        state.drop_weight_cache()
    return result


def _computed(parts: Parts, step: int, batches: list[Batch]) -> StepResult:
    found = gradients(parts, step, batches)
    norm = grad_norm(parts.named_parameters, parts.mesh)
    finite = norm.finite and bool(torch.isfinite(found.loss))
    return StepResult(
        float(found.loss), norm.value, found.target_tokens, found.num_sequences, finite, own_loss=found.own_loss
    )


def _origin(parts: Parts, step: int, batches: list[Batch], before: Before) -> Finding | None:
    """Run a failed step again from the state in which it began, to see where it breaks."""
    before.restore()
    stages = dict(zip(parts.pipeline.stages, parts.stages, strict=True))
    watch = Watch(stages, parts.named_parameters, parts.mesh.rank)

    def run_again(watch: Watch) -> None:
        gradients(parts, step, batches, watch)

    origin = first_nonfinite(watch, run_again, parts.named_parameters, parts.mesh)
    before.restore()
    return origin


def next_batches(parts: Parts) -> list[Batch]:
    """The micro-batches of this rank in the next step, on its device."""
    faults.at("batch")
    batches = parts.loader.next_step()
    for batch in batches:
        faults.trace("samples", ids=batch.sample_ids)
    return [to_device(batch, parts.device) for batch in batches]


def gradients(parts: Parts, step: int, batches: list[Batch] | None = None, watch: Watch | None = None) -> Gradients:
    """Forward and backward of every micro-batch of a step: the mean loss (fp64) a target token, its gradient.

    Both are over the targets of the whole global batch, whatever the mesh and the number of micro-batches. Without
    `batches` they are those of the next step.
    """
    batches = next_batches(parts) if batches is None else batches
    target_tokens = count_targets(parts, batches)
    for stage in parts.stages:
        stage.train()
    parts.buckets.zero_(contributions=len(batches))
    begin_step(parts.routers)
    begin_fp8_step(parts.fp8_states.values(), step, _rounding_seed(parts, step))
    parts.optimizer.refresh()
    passes = Passes(parts, batches, step, scale=1.0 / target_tokens, watch=watch)
    parts.pipeline.run(passes, len(batches), wire_of(parts, batches[0]))
    faults.at("reduce")
    parts.buckets.finish()
    own = passes.loss_sum()
    loss = all_reduce_(own / target_tokens, parts.mesh.group_of(("pp", "dp", "cp")))
    return Gradients(loss, target_tokens, passes.num_sequences, float(own))


def wire_of(parts: Parts, batch: Batch) -> Wire:
    """What travels between pipeline stages for such a micro-batch."""
    return Wire(parts.stages[0].hidden_shape(*batch.tokens.shape), parts.dtype, parts.device)


class Passes:
    """The forward and backward passes of a step's micro-batches, stage by stage, for the pipeline to call.

    The gradient is that of the summed loss x `scale`. `num_sequences` of the global batch weigh auxiliary losses.
    `watch` looks on, if there is one.
    """

    def __init__(
        self, parts: Parts, batches: list[Batch], step: int, *, scale: float, watch: Watch | None = None
    ) -> None:
        self.parts, self.batches, self.step, self.scale, self.watch = parts, batches, step, scale, watch
        self.num_sequences = sum(len(batch.tokens) for batch in batches) * parts.mesh.size("dp")
        self.losses: list[torch.Tensor] = []
        self._stages = dict(zip(parts.pipeline.stages, parts.stages, strict=True))

    def forward(self, stage: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """One micro-batch through one stage: hidden states, or the scaled loss."""
        HEART.beat()
        faults.at("forward")
        batch, model = self.batches[micro_batch], self._stages[stage]
        if self.watch is not None:
            self.watch.begin(stage, micro_batch)
        result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = model(
            batch.tokens,
            batch.targets,
            loss_scale=self.scale,
            segment_ids=batch.segment_ids,
            positions=batch.positions,
            dropout=dropout_key(self.parts, batch, self.step) if model.has_dropout else None,
            num_sequences=self.num_sequences,
            hidden=hidden,
        )
        if isinstance(result, torch.Tensor):
            return result
        faults.spoil("loss", result[0])
        self.losses.append(result[0].detach())
        return result[0] * self.scale

    def split(self, backward: Callable[[], None]) -> Callable[[], None]:
        """Backward without the weight gradients of the linears, which the returned call computes."""
        store = WeightGrads()
        with deferring(store):
            backward()
        return store.run

    def after_backward(self, stage: int, micro_batch: int) -> None:
        """The scales of this stage's FP8 tensors follow each micro-batch."""
        HEART.beat()
        faults.at("backward")
        sharing = self.parts.mesh.group_of(self.parts.config.precision.amax_axes)
        update_states(self._stages[stage].fp8_states.values(), sharing)

    def loss_sum(self) -> torch.Tensor:
        """Of this rank, fp64 on the CPU; zero where the last stage is elsewhere."""
        return torch.tensor(sum(float(loss) for loss in self.losses), dtype=torch.float64)


def dropout_key(parts: Parts, batch: Batch, step: int) -> DropoutKey:
    """Seed and sample numbers from which masks come: the same on any mesh."""
    return DropoutKey(seed_for(parts.config.run.seed, "dropout", step), batch.sample_ids)


def _rounding_seed(parts: Parts, step: int) -> int:
    """What this rank's stochastic rounding draws from in a step: ranks with other tokens or other columns differ."""
    place = [parts.mesh.coord(axis) for axis in ("dp", "cp", "tp")]
    return seed_for(parts.config.run.seed, "fp8 rounding", step, *place)


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
