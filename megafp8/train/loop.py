"""What happens around a step: resume, schedule, measure, evaluate, save, stop."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megafp8.core import faults, log
from megafp8.core.errors import EXIT_OK, NumericsError
from megafp8.core.heartbeat import HEART
from megafp8.core.log import event, get_logger
from megafp8.data.loader import Loader
from megafp8.fp8 import stats
from megafp8.fp8.recipe import recipe as fp8_recipe
from megafp8.models.cost import flops_per_token
from megafp8.nn.balance import load_fields, read_load
from megafp8.parallel.collectives import all_reduce_, merge_dicts
from megafp8.parallel.launch import shutdown
from megafp8.parallel.mesh_config import RANK_ORDER
from megafp8.train import folder, hangs, metrics
from megafp8.train.config import RunConfig, batches_of, schedule_of
from megafp8.train.evaluate import EvalResult, Evaluator
from megafp8.train.facts import precision_counts, write_facts
from megafp8.train.guard import Guards
from megafp8.train.initial import OpenForeign, begin_from
from megafp8.train.load_check import refuse_unfit
from megafp8.train.lock import RunLock
from megafp8.train.progress import StepBar
from megafp8.train.rewinds import extended, read_skips, write_skips
from megafp8.train.saving import Saving
from megafp8.train.setup import Parts, build_parts, start_processes
from megafp8.train.signals import StopRequest
from megafp8.train.state import load_newest_run
from megafp8.train.step import StepResult, train_step
from megafp8.train.stopping import Stops, count_idle_stops, exit_code, stopped_before
from megafp8.train.telemetry import GpuReadings, memory_bytes, peak_flops

logger = get_logger(__name__)


@dataclass(frozen=True)
class RunResult:
    """How a run ended: exit code, last step, last training loss, last validation results, newest checkpoint."""

    exit_code: int
    step: int
    loss: float
    evals: tuple[EvalResult, ...]
    checkpoint: Path | None


def train(config: RunConfig, open_foreign: OpenForeign | None = None) -> RunResult:
    """Run or resume a run to its end; collective over all ranks.

    Args:
        open_foreign: how a Hugging Face folder in `checkpoint.load_from` is read.

    Raises:
        MegaError: see `megafp8.core.errors`; nothing half-written stays behind.
    """
    if not HEART.kept:  # a program of its own may train several times
        HEART.begin()
    request = StopRequest(HEART)
    request.install(config.guard.stop_signals)
    device, mesh = start_processes(config)
    HEART.beat("setup")
    faults.at("setup")
    lock = RunLock(config.dir)
    stops = Stops(config, mesh, request, lock)
    try:
        stopped = 0
        if mesh.rank == 0:
            lock.acquire()
            stopped = stopped_before(config.dir)
            HEART.tell(holds_folder=True)
            folder.prepare(config)
            hangs.clear(config.dir)
            log.set_up(rank=0, file=config.dir / "log.txt")
        else:
            log.set_up(rank=mesh.rank)
        # rank 0 has accepted the folder before any other rank looks into it
        everyone = mesh.group_of(RANK_ORDER)
        stopped = int(all_reduce_(torch.tensor([float(stopped)]), everyone, "max").item())
        if stopped:
            event(logger, "this job was told to stop: not started again", exit_code=stopped)
            return RunResult(stopped, 0, float("nan"), (), None)
        refuse_unfit(config)
        return Run(build_parts(config, mesh, device), stops, open_foreign).go()
    finally:
        faults.at("exit")
        shutdown()
        lock.release()
        if not HEART.kept:
            request.uninstall()


@dataclass
class Run:
    """One attempt at a run."""

    parts: Parts
    stops: Stops
    open_foreign: OpenForeign | None = None
    step: int = 0
    first_step: int = 0  # where this attempt began
    evaluation_due: bool = False  # of the step that was taken last
    loss: float = float("nan")
    evals: tuple[EvalResult, ...] = ()
    saved: Path | None = None  # what the run began from
    run_seconds: float = 0.0  # of all attempts
    productive_seconds: float = 0.0  # of the steps that count
    began: float = field(default_factory=time.perf_counter)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=20))  # seconds a sample in the last steps

    def __post_init__(self) -> None:
        config, parts = self.parts.config, self.parts
        self.rank0 = parts.mesh.rank == 0
        assert isinstance(parts.loader, Loader), "a run reads its corpus"
        self.loader = parts.loader
        self.starts: deque[int] = deque(maxlen=config.guard.spike_skip_steps)  # the last steps' first samples
        self.moe_layers = [i for i in range(config.model.num_layers) if config.model.moe.is_moe_layer(i)]
        self.guards = Guards(parts)
        self.evaluate = Evaluator(parts)
        self.gpu = GpuReadings(parts.device)
        counts = precision_counts(config)
        self.gemm_counts = {name: counts[name] for name in ("gemms", "fp8_gemms") if counts}
        self.what_if = {name: fp8_recipe(name) for name in config.log.fp8_what_if}
        self.learning_rate = schedule_of(config)
        self.total_samples = batches_of(config).consumed_after(config.train.steps)
        model, sequence = config.model, config.data.sequence_length
        self.flops_per_token = tuple(flops_per_token(model, sequence, causal=causal) for causal in (True, False))
        self.peak = peak_flops(parts.device, parts.dtype)
        self._resume()
        self.writer = metrics.MetricsWriter(config.dir, enabled=self.rank0, tensorboard=config.log.tensorboard)
        self.saving = Saving(parts, self.writer, self.saved)
        self.guards.report_to(self.writer, self.saving)

    def _resume(self) -> None:
        config, parts = self.parts.config, self.parts
        found = load_newest_run(parts)
        self.loader.skips = read_skips(config.dir, found and found[1], parts.mesh)
        if found is not None:
            self.saved, self.step = found[0], found[1]["step"]
        elif (begun := begin_from(parts, self.open_foreign)) is not None:
            self.step = begun[1]["step"]
        self.first_step, due, totals = self.step, torch.zeros(1), metrics.Totals()
        if self.rank0:
            totals = metrics.rewind(config.dir / "metrics.jsonl", self.step, num_losses=config.guard.spike_window)
            due += found is not None and folder.evaluation_due(config, self.step)
            self.run_seconds = totals.run_seconds
            write_facts(parts, self.peak)
            folder.keep_tokenizer(config)
        self._go_on_from(totals)
        self.evaluation_due = bool(all_reduce_(due, parts.mesh.group_of(RANK_ORDER), "max").item())
        if found is not None:
            event(logger, "resumed", step=self.step, checkpoint=str(self.saved))

    def _go_on_from(self, totals: metrics.Totals) -> None:
        """Take up what rank 0 has read of the steps so far; collective."""
        known = {"totals": totals} if self.rank0 else {}
        totals = merge_dicts(known, self.parts.mesh.group_of(RANK_ORDER))["totals"]
        self.productive_seconds = totals.productive_seconds
        self.guards.judge.losses.restart(totals.losses)

    def go(self) -> RunResult:
        """Take all steps that are left."""
        config = self.parts.config
        if self.saved is not None and self.step < config.train.steps:
            self.writer.write("event", self.step, event="resumed", checkpoint=str(self.saved))
        if self.step >= config.train.steps and not self.evaluation_due:
            event(logger, "nothing to do: all steps are done", steps=config.train.steps)
        bar = StepBar(config.name, start=self.step, steps=config.train.steps, enabled=self.rank0)
        with contextlib.closing(self.saving), bar:
            while self.step < config.train.steps or self.evaluation_due:
                reason = self.stops.agreed()
                if reason:
                    return self._stopped(reason)
                if self.evaluation_due:
                    self._evaluate()
                else:
                    self._one_step(bar)
            self.saving.last(self.step, self._progress())
        self.writer.close()
        return RunResult(EXIT_OK, self.step, self.loss, self.evals, self.saving.newest)

    def _one_step(self, bar: StepBar) -> None:
        config, parts = self.parts.config, self.parts
        self.step += 1
        HEART.beat("step" if self.recent else "first step", self.step)
        samples = parts.loader.consumed_samples + parts.loader.global_batch
        rate = self.learning_rate(step=self.step, consumed_samples=samples)
        wants_stats = config.log.fp8_interval > 0 and self.step % config.log.fp8_interval == 0
        if wants_stats:
            stats.arm(parts.fp8_states.values(), modules=config.log.fp8_modules, what_if=self.what_if)
        self.guards.begin(self.step)
        start = time.perf_counter()
        self.starts.append(parts.loader.consumed_samples)
        result = train_step(parts, self.step, rate, self.guards.judge)
        seconds = time.perf_counter() - start
        self.loss = result.loss
        self._write_step(result, rate, seconds)
        if self.moe_layers and self.step % config.log.interval == 0:
            self._write_load()
        tokens = result.num_sequences * config.data.sequence_length
        bar.advance(loss=result.loss, tokens_per_second=tokens / seconds, eta_seconds=self._eta())
        if wants_stats:  # each pipeline rank has those of its layers
            found = stats.read(parts.fp8_states.values(), parts.mesh.group_of(("dp", "cp", "tp")))
            found = merge_dicts(found, parts.mesh.group("pp"))
            if found:
                self.writer.write("fp8", self.step, stats=found, **self.gemm_counts)
        if self.guards.look_at(self.step, result) and self._rewind(result):
            return
        last = self.step == config.train.steps
        if last or (config.train.eval_interval and self.step % config.train.eval_interval == 0):
            self._evaluate()
        interval = config.checkpoint.interval
        self.guards.compare(self.step, saves=last or (interval > 0 and self.step % interval == 0))
        self.saving.step_done(self.step, self._progress())

    def _rewind(self, result: StepResult) -> bool:
        """Back to the newest checkpoint, without the samples of the last steps; False where there is none."""
        guard, folder_ = self.parts.config.guard, self.parts.config.dir
        if len(self.loader.skips) >= guard.max_rewinds:
            raise NumericsError(
                f"step {self.step}: loss {result.loss:.6g} jumped, after {guard.max_rewinds} rewinds "
                "(guard.max_rewinds); nothing was saved after it: lower optimizer.lr, or raise guard.max_rewinds"
            )
        self.saving.settle()
        begin, end = self.starts[0], self.loader.consumed_samples
        found = load_newest_run(self.parts)
        if found is None:
            self.guards.judge.refuse(self.step, result.loss, guard)
            return False
        spike, self.step = self.step, found[1]["step"]
        begin = max(begin, found[1]["consumed_samples"])
        source = self.loader.numbers(begin, end)
        self.loader.skips = extended(self.loader.skips, begin, end)
        if self.rank0:
            write_skips(folder_, self.loader.skips)
        self._go_on_from(self.writer.rewind(self.step, num_losses=guard.spike_window))
        self.starts.clear()
        left_out = f"{source[0]}..{source[-1]}"
        event(logger, "rewound", level=logging.WARNING, step=self.step, spike_at=spike, samples_left_out=left_out)
        where = {"spike_at": spike, "samples_left_out": [int(source[0]), int(source[-1])]}
        self.writer.write("event", self.step, event="rewound", **where)
        return True

    def _write_step(self, result: StepResult, rate: float, seconds: float) -> None:
        config, parts = self.parts.config, self.parts
        self.productive_seconds += seconds if result.taken else 0.0
        self.recent.append(seconds / result.num_sequences)
        tokens = result.num_sequences * config.data.sequence_length
        per_rank = tokens / seconds / parts.mesh.world
        causal, full = self.flops_per_token
        elapsed = self.run_seconds + time.perf_counter() - self.began
        record: dict[str, Any] = {
            "consumed_samples": parts.loader.consumed_samples,
            "consumed_tokens": parts.loader.consumed_samples * config.data.sequence_length,
            "target_tokens": result.target_tokens,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": rate,
            "loss_scale": 1.0,
            "global_batch": result.num_sequences,
            "world_size": parts.mesh.world,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "tflops_causal": per_rank * causal / 1e12,
            "tflops_full": per_rank * full / 1e12,
            "mfu_causal": per_rank * causal / self.peak[0],
            "mfu_full": per_rank * full / self.peak[0],
            "skipped": self.guards.nonfinite.total + (not result.finite),
            "nan": self.guards.nonfinite.total + (not result.finite),
            "memory_bytes": memory_bytes(parts.device),
            "run_seconds": elapsed,
            "productive_seconds": self.productive_seconds,
            "goodput": min(1.0, self.productive_seconds / elapsed),
            **({} if result.taken else {"taken": False}),
            **({"spike": True} if self.guards.judge.spiked else {}),
        }
        self.writer.write("train", self.step, **record)
        if self.step % config.log.interval == 0 or self.step in (1, config.train.steps):
            done = {"step": self.step, **record}
            line = metrics.console_line(done, steps=config.train.steps, eta_seconds=self._eta())
            event(logger, line)
            reading = self.gpu.read()
            if reading:
                self.writer.write("gpu", self.step, stats=reading)

    def _eta(self) -> float:
        """Seconds to the end at the pace of a sample in the last steps: a batch ramp changes that of a step."""
        if self.step >= self.parts.config.train.steps:
            return 0.0
        # the median leaves out the first step's compilation and a step that a neighbour disturbed
        left = self.total_samples - self.parts.loader.consumed_samples
        return statistics.median(self.recent) * max(0, left)

    def _write_load(self) -> None:
        parts, moe = self.parts, self.parts.config.model.moe
        loads = read_load(
            parts.routers, parts.mesh, moe_layers=self.moe_layers, num_experts=moe.num_experts, device=parts.device
        )
        self.writer.write("moe", self.step, **load_fields(loads))

    def _evaluate(self) -> None:
        HEART.beat("evaluation")
        found = self.evaluate(lambda: bool(self.stops.agreed()))
        self.evaluation_due = found is None
        if found is None:
            event(logger, "evaluation put off, as the run is to stop", step=self.step)
            return
        self.evals = tuple(found)
        for result in self.evals:
            values: dict[str, Any] = {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}
            self.writer.write("eval", self.step, name=result.name, **values)
            event(logger, "validation", step=self.step, name=result.name, **values)

    def _progress(self) -> dict[str, Any]:
        """What a checkpoint holds of the run itself."""
        return {"productive_seconds": self.productive_seconds, "skipped_samples": self.loader.skips}

    def _stopped(self, reason: str) -> RunResult:
        if self.step > self.first_step or self.saved is not None:
            self.guards.compare(self.step, saves=True)
            self.saving.last(self.step, self._progress())
        why = self.stops.describe(reason)
        first = "remove the file and " if reason == "file" else ""
        event(logger, f"stopped; {first}run the same command again to go on", step=self.step, reason=why)
        self.writer.write("event", self.step, event="preempted", signal=why)
        self.writer.close()
        if self.rank0 and why != "SIGINT" and reason != "file":
            count_idle_stops(self.parts.config.dir, self.step, first_step=self.first_step, reason=reason)
        return RunResult(exit_code(reason), self.step, self.loss, self.evals, self.saving.newest)
