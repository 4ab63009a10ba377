"""RunConfig: one frozen tree of sections, each written beside the code that it steers.

TOML <- dotted overrides <- presets filled in; what only a combination can break is judged here, all at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megafp8.checkpoint.config import CheckpointConfig
from megafp8.core.config import apply_overrides, build, config_dataclass, load_toml, nearest
from megafp8.core.errors import ConfigError
from megafp8.data.batch_size import BatchSize, batch_problems, ramp_problems
from megafp8.data.config import DataConfig
from megafp8.models.config import ModelConfig, check_model, quantizable_shapes
from megafp8.nn.precision import RECIPES, PrecisionConfig, gather_problems, plan_gemms, reduces_amax, token_rule
from megafp8.nn.te_config import te_problems
from megafp8.optim.config import OptimizerConfig
from megafp8.optim.lr import Schedule
from megafp8.parallel.mesh_config import ParallelConfig, axis_sizes, check_mesh
from megafp8.parallel.stages import num_stages, schedule_problems
from megafp8.train.guard_config import GuardSection
from megafp8.train.nearest_mesh import changed_axes, nearest_mesh


@config_dataclass
class RunSection:
    """Which run this is and where it lives."""

    dir: Annotated[str, Field(min_length=1, description="run folder: config, metrics, log, checkpoints")]
    name: Annotated[str, Field(description="shown in reports; empty = the folder's name")] = ""
    seed: Annotated[int, Field(ge=0, lt=1 << 63, description="of initialisation, data order and dropout")] = 1234


@config_dataclass
class TrainSection:
    """How long and in which portions."""

    steps: Annotated[int, Field(gt=0, description="optimizer steps")]
    global_batch: Annotated[int, Field(gt=0, description="sequences a step, over all ranks")]
    batch_ramp: Annotated[
        tuple[int, ...],
        Field(description="[start, increment, samples]: the batch grows to global_batch over so many; [] = no ramp"),
    ] = ()
    micro_batch: Annotated[int, Field(gt=0, description="sequences a forward pass of one rank")] = 1
    eval_interval: Annotated[int, Field(ge=0, description="steps between evaluations; 0 = only after the last")] = 100
    eval_samples: Annotated[int, Field(gt=0, description="validation sequences of each set, always the same ones")] = 64
    recompute: Annotated[
        Literal["none", "selective", "full"], Field(description="activations recomputed in backward")
    ] = "none"
    recompute_layers: Annotated[
        int, Field(ge=0, description="full: layers of each pipeline stage that are recomputed, the first ones; 0 = all")
    ] = 0
    recompute_modules: Annotated[
        tuple[Literal["core_attention", "norm", "activation"], ...],
        Field(min_length=1, description="selective: what of each layer is recomputed"),
    ] = ("norm", "activation")
    compile: Annotated[
        Literal["auto", "on", "off"], Field(description="torch.compile of the layers; auto = where a compiler is")
    ] = "auto"
    deterministic: Annotated[bool, Field(description="only kernels that give the same bits every time")] = False
    max_nonfinite_steps: Annotated[
        int, Field(ge=0, description="steps in a row that may be skipped for a loss or gradient that is not finite")
    ] = 5
    threads: Annotated[int, Field(ge=0, description="CPU threads a rank; 0 = cores / local ranks")] = 0
    timeout_seconds: Annotated[
        int, Field(gt=0, description="without progress in a micro-batch, after which a rank counts as hung")
    ] = 600
    exit_after_seconds: Annotated[
        float, Field(ge=0, description="since the start, after which the run saves and ends with code 75; 0 = never")
    ] = 0.0

    def __post_init__(self) -> None:
        problems = ramp_problems(self.global_batch, self.batch_ramp)
        if problems:
            raise ValueError("; ".join(problems))


@config_dataclass
class LogSection:
    """What is written down, and how often."""

    interval: Annotated[int, Field(gt=0, description="steps between console lines")] = 10
    tensorboard: Annotated[bool, Field(description="event files under Megatron-LM's tag names")] = True
    fp8_interval: Annotated[int, Field(ge=0, description="steps between FP8 statistics; 0 = never")] = 0
    fp8_modules: Annotated[
        str, Field(description="regex found in the names of the linears that they are taken of; empty = all")
    ] = ""
    fp8_what_if: Annotated[
        tuple[str, ...], Field(description="recipes that are measured beside the one in use, with their defaults")
    ] = ()

    def __post_init__(self) -> None:
        problems = [_what_if_problem(name) for name in self.fp8_what_if]
        try:
            re.compile(self.fp8_modules)
        except re.error as error:
            problems.append(f"fp8_modules = {self.fp8_modules!r}: not a regular expression: {error}")
        if any(problems):
            raise ValueError("\n".join(problem for problem in problems if problem))


def _what_if_problem(name: str) -> str:
    if name == "delayed":
        return (
            "fp8_what_if = 'delayed': its scales come from amax histories, which only a run in it has; nearest: "
            "'current'"
        )
    names = [recipe for recipe in RECIPES if recipe != "delayed"]
    return "" if name in names else f"fp8_what_if = {name!r}: is not one of {', '.join(names)}{nearest(name, names)}"


@config_dataclass
class RunConfig:
    """Everything that `megafp8 pretrain` reads."""

    run: RunSection
    model: ModelConfig
    data: DataConfig
    train: TrainSection
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogSection = Field(default_factory=LogSection)
    guard: GuardSection = Field(default_factory=GuardSection)

    @property
    def dir(self) -> Path:
        """The run folder."""
        return Path(self.run.dir)

    @property
    def name(self) -> str:
        """The run's name in reports."""
        return self.run.name or self.dir.name


def load_run_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's TOML and lay overrides over it.

    Raises:
        ConfigError: no such file, not TOML, or broken rules, a line each.
    """
    return build(RunConfig, apply_overrides(load_toml(path), overrides))


def check_run(config: RunConfig, world: int) -> list[str]:
    """Every rule that the combination breaks on `world` ranks, a line each with the way out; needs no torch.

    Where another mesh alone would break none, the last line names the nearest.
    """
    problems = _broken_rules(config, world)
    if not problems or world < 1:
        return problems
    found = nearest_mesh(config.parallel, world, lambda other: _broken_rules(replace(config, parallel=other), world))
    change = changed_axes(config.parallel, found) if found else ""
    if change and not (len(problems) == 1 and problems[0].endswith(f"nearest: {change}")):
        problems.append(f"parallel: the nearest mesh of {world} processes that breaks no rule has {change}")
    return problems


def _broken_rules(config: RunConfig, world: int) -> list[str]:
    parallel = config.parallel
    mesh_problems = check_mesh(parallel, world)
    problems = mesh_problems + check_model(
        config.model,
        tp=parallel.tp,
        ep=parallel.ep,
        etp=parallel.etp,
        cp=parallel.cp,
        cp_exchange=parallel.cp_exchange,
        sequence_parallel=parallel.sequence_parallel,
        sequence_length=config.data.sequence_length,
        precision=config.precision,
    )
    problems += schedule_problems(parallel, config.model.num_layers)
    # of a mesh that does not fit, dp is known only if it is given; a batch is at least whole micro-batches
    dp = max(1, parallel.dp) if mesh_problems else axis_sizes(parallel, world)["dp"]
    train = config.train
    problems += batch_problems(train.global_batch, train.batch_ramp, dp=dp, micro_batch=train.micro_batch)
    problems += _token_problems(config) + _recompute_problems(config) + _shard_problems(parallel)
    problems += _moment_problems(config) + _statistics_problems(config) + _engine_problems(config)
    problems += gather_problems(config.precision, parallel.dp_shard)
    return problems + schedule_of(config).problems()


def _statistics_problems(config: RunConfig) -> list[str]:
    """A pattern that no FP8 linear matches; a run in bf16 has none, and may share its file with one in FP8."""
    pattern = config.log.fp8_modules
    plan, _ = plan_gemms(config.precision, list(quantizable_shapes(config.model)), config.model.num_layers)
    quantized = [name for name, recipe in plan.items() if recipe != "none"]
    if not pattern or not quantized or any(re.search(pattern, name) for name in quantized):
        return []
    kinds = dict.fromkeys(name.split(".", 2)[2] for name in quantized)
    layers = sorted({int(name.split(".")[1]) for name in quantized})
    return [
        f"log.fp8_modules = {pattern!r}: matches no linear in FP8; they are {', '.join(kinds)} in "
        f"layers.{layers[0]} to layers.{layers[-1]}"
    ]


def _engine_problems(config: RunConfig) -> list[str]:
    precision, parallel, train = config.precision, config.parallel, config.train
    if precision.backend != "te":
        return []
    return te_problems(
        precision.te,
        recompute=train.recompute,
        recompute_modules=train.recompute_modules,
        full_shard=parallel.dp_shard == "full",
        pipeline=parallel.pp > 1,
        experts=config.model.moe.num_experts > 0,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        reduces_amax=reduces_amax(precision),
        even_vocabulary=config.model.vocab_size % parallel.tp == 0,
        tp_first=parallel.order.startswith("tp"),
        statistics=config.log.fp8_interval > 0,
    )


def _recompute_problems(config: RunConfig) -> list[str]:
    layers, parallel = config.train.recompute_layers, config.parallel
    if layers and config.train.recompute != "full":
        rule = f'with recompute = "{config.train.recompute}" no whole layers are recomputed'
        return [f'train.recompute_layers = {layers}: {rule}; nearest: 0, or recompute = "full"']
    most = max(parallel.layers_per_stage, default=-(-config.model.num_layers // num_stages(parallel)))
    if layers <= most:
        return []
    return [f"train.recompute_layers = {layers}: a stage has at most {most} layers; nearest: {most}, or 0 for all"]


def _shard_problems(parallel: ParallelConfig) -> list[str]:
    apart = ("zb_h1", "zb_v", "dualpipe_v")
    if parallel.dp_shard != "full" or parallel.pp == 1 or parallel.schedule not in apart:
        return []
    return [
        f'parallel.dp_shard = "full": schedule {parallel.schedule} computes weight gradients apart from the backward '
        'pass, and torch\'s fully_shard takes them only from it; nearest: schedule = "1f1b", or dp_shard = "optimizer"'
    ]


def _moment_problems(config: RunConfig) -> list[str]:
    optimizer = config.optimizer
    if config.precision.dtype != "fp64" or not optimizer.has_narrow_moments:
        return []
    return [
        f"optimizer.exp_avg_dtype = {optimizer.exp_avg_dtype!r}, exp_avg_sq_dtype = {optimizer.exp_avg_sq_dtype!r}: "
        'narrow moments are of fp32 masters, those of precision.dtype "fp64" are fp64; nearest: "fp32" for both '
        '(as the masters), or dtype = "fp32"'
    ]


def _token_problems(config: RunConfig) -> list[str]:
    """The weight gradient sums over a rank's tokens of a micro-batch, so they too are a dim of an FP8 GEMM.

    Under sequence parallelism the whole sequence's tokens count: a shard that ends inside a block is gathered in the
    compute dtype and quantized after, as Transformer Engine does.
    """
    plan, _ = plan_gemms(config.precision, list(quantizable_shapes(config.model)), config.model.num_layers)
    multiple, recipe = token_rule(plan)
    tokens, unit = config.train.micro_batch * config.data.sequence_length, multiple * config.parallel.cp
    if config.model.mla.enabled and config.parallel.sequence_parallel:
        unit *= config.parallel.tp  # the down-projections see a shard of the sequence
    if tokens % unit == 0:
        return []
    near = config.data.sequence_length // unit * unit
    choices = ", ".join(str(n) for n in (near, near + unit) if n)
    ranks = [f" x parallel.cp {config.parallel.cp}"] if config.parallel.cp > 1 else []
    ranks += [f" x parallel.tp {config.parallel.tp}"] if unit > multiple * config.parallel.cp else []
    needed = f"{multiple}{''.join(ranks)}"
    micro_batch = unit // gcd(unit, config.data.sequence_length)
    return [
        f"train.micro_batch {config.train.micro_batch} x data.sequence_length {config.data.sequence_length} = {tokens} "
        f"tokens are not a multiple of {needed}, as recipe {recipe} needs; nearest data.sequence_length: {choices}, or "
        f"micro_batch: a multiple of {micro_batch}"
    ]


def batches_of(config: RunConfig) -> BatchSize:
    """The global batch of each step of this run."""
    return BatchSize(config.train.global_batch, config.train.batch_ramp)


def schedule_of(config: RunConfig) -> Schedule:
    """The learning rate of each step of this run."""
    return Schedule(
        config.optimizer,
        batches_of(config),
        sequence_length=config.data.sequence_length,
        total_steps=config.train.steps,
    )


def section_limits(config: RunConfig) -> dict[str, float]:
    """Seconds without a sign of life after which a rank counts as hung, by section (`core.heartbeat.SECTIONS`).

    At the start ranks wait for each other, and say themselves whom they miss, so that comes first.
    """
    step, setup = config.train.timeout_seconds, config.guard.setup_timeout_seconds
    first = max(step, setup)
    save = config.guard.save_timeout_seconds
    return {"start": setup + 60, "setup": setup, "first step": first, "step": step, "evaluation": step, "save": save,
            "exit": 60}  # fmt: skip


def refuse_broken(config: RunConfig, world: int) -> None:
    """Raise ConfigError with all that `check_run` finds."""
    problems = check_run(config, world)
    if problems:
        raise ConfigError("\n".join(problems))
