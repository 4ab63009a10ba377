"""Train the 1.5B model for a few steps on made-up tokens: tokens a second, MFU, peak memory, loss curve.

The configuration is that of examples/fp8_vs_bf16; what a step is, is the trainer's own `train_step`. Only the files are
missing: the tokens come from a small Markov chain, which a model learns in tens of steps.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megafp8.core import log
from megafp8.core.errors import ConfigError
from megafp8.data.loader import Batch
from megafp8.fp8.backends.hardware import hardware_of, refusal
from megafp8.fp8.recipe import recipe
from megafp8.models.activations import Workload
from megafp8.models.cost import flops_per_token, num_parameters
from megafp8.models.memory import memory_bytes as estimated_bytes
from megafp8.train.config import RunConfig, load_run_config
from megafp8.train.setup import Parts, assemble, start_processes
from megafp8.train.step import train_step
from megafp8.train.telemetry import memory_bytes, peak_flops
from tests.gpu.report import Clock, Figures, part_arguments

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fp8_vs_bf16" / "pretrain_1b5.toml"
MICRO_BATCHES = 2  # a step: the weights' FP8 copies serve more than one
STEPS = 60
WARM_UP = 5  # steps that are not timed: compilation, allocator, clocks
MOST_MICRO_BATCH = 4  # 16,384 tokens: GEMMs gain little from more, and a step stays below a second
MEMORY_SHARE = 0.85  # of the GPU for what the formulas count; the rest is the allocator's and the libraries'
TINY = {
    "model.preset": "", "model.num_layers": 2, "model.hidden_size": 128, "model.ffn_hidden_size": 256,
    "model.num_attention_heads": 4, "model.num_kv_heads": 2, "model.vocab_size": 256, "model.max_sequence_length": 128,
    "data.sequence_length": 128, "train.compile": "off", "train.threads": 1,
}  # fmt: skip


def run_config(args: Any, micro_batch: int) -> RunConfig:
    """The example's configuration on one GPU, or a tiny model."""
    values: dict[str, Any] = {
        "train.micro_batch": micro_batch, "train.global_batch": micro_batch * MICRO_BATCHES, "train.steps": args.steps,
        "precision.recipe": args.recipe, "precision.warmup_steps": min(WARM_UP, args.steps // 3),
        "optimizer.warmup_steps": min(WARM_UP, args.steps - 1),
        **(TINY if args.tiny else {}),
    }  # fmt: skip
    if args.recipe != "none":
        values["precision.backend"] = args.backend
    words = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
    return load_run_config(EXAMPLE, words)


class MarkovTokens:
    """Samples of a chain: three times in four the next token follows from the last, else it is drawn by Zipf's law.

    All steps are made beforehand, so that no step waits for numpy.
    """

    def __init__(self, config: RunConfig, steps: int) -> None:
        self.consumed_samples, self.global_batch = 0, config.train.global_batch
        self._micro_batch = config.train.micro_batch
        rng = np.random.default_rng(1234)
        alphabet = min(4096, config.model.vocab_size)
        follows = rng.permutation(alphabet)
        weights = 1.0 / np.arange(1, alphabet + 1)
        shape = (steps * config.train.global_batch, config.data.sequence_length + 1)
        ids = rng.choice(alphabet, size=shape, p=weights / weights.sum())
        free = rng.random(shape) < 0.25
        for place in range(1, shape[1]):
            ids[:, place] = np.where(free[:, place], ids[:, place], follows[ids[:, place - 1]])
        self._ids = torch.from_numpy(ids)

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step."""
        batches = []
        for start in range(self.consumed_samples, self.consumed_samples + self.global_batch, self._micro_batch):
            rows = self._ids[start : start + self._micro_batch]
            numbers = torch.arange(start, start + len(rows))
            batches.append(Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), numbers))
        self.consumed_samples += self.global_batch
        return batches


def first_micro_batch(args: Any, device: torch.device) -> int:
    """The largest micro-batch whose bytes, by the formulas of `models/memory`, fit this GPU."""
    if args.micro_batch:
        return int(args.micro_batch)
    if device.type == "cpu":
        return 2
    usable = torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE
    size = MOST_MICRO_BATCH
    while size > 1:
        config = run_config(args, size)
        work = Workload(size, config.data.sequence_length, MICRO_BATCHES, precision=config.precision)
        if estimated_bytes(config.model, work).total <= usable:
            break
        size //= 2
    return size


def measure(config: RunConfig, parts: Parts, figures: Figures, clock: Clock) -> None:
    """Steps until the configuration's last one or the end of the budget."""
    losses: list[float] = []
    norms: list[float] = []
    seconds: list[float] = []
    causal, full = (flops_per_token(config.model, config.data.sequence_length, causal=c) for c in (True, False))
    peak, source = peak_flops(parts.device, parts.dtype)
    figures.put(peak_flops=peak, peak_source=source, flops_per_token_full=full, flops_per_token_causal=causal)
    while len(losses) < config.train.steps and (len(losses) < 2 or clock.left > 3 * seconds[-1] + 5):
        start = time.perf_counter()
        result = train_step(parts, len(losses) + 1, config.optimizer.lr)
        if parts.device.type == "cuda":
            torch.cuda.synchronize(parts.device)
        seconds.append(time.perf_counter() - start)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        figures.put(losses=losses, gradient_norms=norms, step_seconds=seconds, first_step_seconds=seconds[0])
    timed = seconds[WARM_UP:] if len(seconds) > 2 * WARM_UP else seconds[len(seconds) // 2 :]
    tokens = config.train.global_batch * config.data.sequence_length
    rate = tokens / statistics.median(timed)
    figures.put(
        tokens_per_second=rate, timed_steps=len(timed), tflops_full=rate * full / 1e12, mfu_full=rate * full / peak,
        mfu_causal=rate * causal / peak, peak_memory_bytes=memory_bytes(parts.device),
    )  # fmt: skip
    broken = [step + 1 for step, loss in enumerate(losses) if not np.isfinite(loss)]
    if broken:
        figures.put(status="failed", reason=f"the loss is not finite in step {broken[0]}")
    elif len(losses) >= 20 and statistics.mean(losses[-5:]) >= losses[0] - 0.5:
        # the chain's conditional entropy lies several nats below a fresh model's loss, ln(vocabulary)
        figures.put(status="failed", reason=f"the loss does not fall: {losses[0]:.3f}, then {losses[-1]:.3f}")
    else:
        figures.put(status="passed")


def train(args: Any, figures: Figures, clock: Clock) -> None:
    """Assemble and measure, with half the micro-batch where memory does not suffice."""
    device, mesh = start_processes(run_config(args, 1))
    micro_batch = first_micro_batch(args, device)
    while True:
        config = run_config(args, micro_batch)
        figures.put(
            micro_batch=micro_batch, micro_batches=MICRO_BATCHES, sequence_length=config.data.sequence_length,
            parameters=num_parameters(config.model), recipe=args.recipe,
        )  # fmt: skip
        try:
            parts = assemble(config, mesh, device, MarkovTokens(config, config.train.steps))
            states = list(parts.fp8_states.values())
            chosen = states[0].backend if states else None
            figures.put(
                backend=chosen.name if chosen else args.backend if args.recipe != "none" else "bf16",
                why=chosen.reason if chosen else "no FP8 state of our own", fp8_linears=len(states),
            )  # fmt: skip
            return measure(config, parts, figures, clock)
        except torch.OutOfMemoryError as error:
            if micro_batch == 1 or clock.left < 20:
                return figures.put(status="error", reason=f"out of memory at micro-batch {micro_batch}: {error}")
            print(f"micro-batch {micro_batch} does not fit, half of it", flush=True)
        parts = chosen = states = None  # type: ignore[assignment]  # its memory, before the next try
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        micro_batch //= 2


def main() -> int:
    parser = part_arguments("Train the 1.5B model for a few steps.")
    parser.add_argument("--recipe", required=True, help="none, or an FP8 recipe")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences; 0: as many as fit")
    parser.add_argument("--steps", type=int, default=0)
    args = parser.parse_args()
    args.steps = args.steps or (6 if args.tiny else STEPS)
    log.set_up()
    figures, clock = Figures(args.out), Clock(args.seconds)
    try:
        train(args, figures, clock)
    except ConfigError as error:
        # a recipe that this machine does not serve is refused, which is no failure; a refusal without cause is one
        expected = args.backend == "te" or (args.recipe != "none" and refusal(recipe(args.recipe), hardware_of(None)))
        figures.put(status="skipped" if expected else "error", reason=str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
