"""Tokens a second of a training step: ours in BF16 and FP8 against a plain loop around transformers' Llama.

Every contender is a process of its own (memory is measured there), and they take turns step by step, so that what
else the machine does hits all alike. Ratios are medians of the ratios of a round; CPU seconds are given beside the
wall clock because they hold on a busy machine too.

    python -m benchmarks.train_step --threads 2 --steps 10 --fp8
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contenders import Contender, serve, summary, take_turns

BATCH, LENGTH, VOCAB = 4, 512, 8192
TOKENS = BATCH * LENGTH
NAMES = ("ours_bf16", "ours_fp8", "transformers_eager", "transformers_compiled")
BASE = "transformers_eager"


def ours(precision: str) -> Callable[[], float]:
    """The training loop's own step: model, gradient buckets, norm and clip, AdamW over fp32 masters."""
    import torch

    from megafp8.fp8.linear import update_states
    from megafp8.models import ModelConfig, build
    from megafp8.nn.precision import PrecisionConfig
    from megafp8.optim.adamw import AdamW
    from megafp8.optim.clip import clip_scale, grad_norm
    from megafp8.optim.config import OptimizerConfig
    from megafp8.parallel.buckets import GradBuckets
    from megafp8.parallel.mesh import Mesh

    mesh = Mesh.single()
    section = PrecisionConfig(recipe="delayed") if precision == "fp8" else PrecisionConfig()
    model = build(ModelConfig(preset="bench"), precision=section, compile_layers=True)
    named = list(model.named_parameters())
    buckets, optimizer = GradBuckets(named, mesh), AdamW(named, OptimizerConfig(), mesh)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)

    def step() -> float:
        buckets.zero_()
        loss, _ = model(tokens, targets, loss_scale=1 / TOKENS)
        (loss * (1 / TOKENS)).backward()
        update_states(model.fp8_states.values())
        buckets.finish()
        norm = grad_norm(named, mesh).value
        optimizer.step(3e-4, grad_scale=clip_scale(norm, 1.0))
        for state in model.fp8_states.values():
            state.drop_weight_cache()
        return float(loss.detach()) / TOKENS

    return step


def transformers_loop(mode: str) -> Callable[[], float]:
    """LlamaForCausalLM with fp32 weights under bf16 autocast, fused AdamW."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1408,
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    call: Any = torch.compile(model) if mode == "compiled" else model
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def contend(name: str, threads: int) -> None:
    """Child: serve steps of the named contender."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    build = ours if name.startswith("ours") else transformers_loop
    serve(lambda: build(name.split("_")[1]))


def measure(names: list[str], *, threads: int, steps: int) -> dict[str, Any]:
    """Run the contenders in turn; seconds, tokens/s, ratios to `BASE`, peak memory."""
    words = ["benchmarks.train_step", "--threads", str(threads), "--contender"]
    contenders = {name: Contender([*words, name], ranks=1, threads=threads) for name in names}
    take_turns(contenders, steps)
    return {"threads": threads, "steps": steps, "tokens": TOKENS} | {
        name: summary(contender, contenders.get(BASE), tokens=TOKENS) for name, contender in contenders.items()
    }


def show(result: dict[str, Any], names: list[str]) -> None:
    """Print the table."""
    head = ("contender", "tokens/s", "ms", "cpu ms", "x eager", "x (cpu)", "peak MB", "first step s")
    print(("{:<22}" + "{:>13}" * 7).format(*head))
    for name in names:
        row = result[name]
        print(
            f"{name:<22}{row['tokens_per_second']:>13.0f}{row['seconds'] * 1e3:>13.0f}{row['cpu_seconds'] * 1e3:>13.0f}"
            f"{row.get('speedup_seconds', 0):>13.2f}{row.get('speedup_cpu_seconds', 0):>13.2f}"
            f"{row['peak_bytes'] / 1e6:>13.0f}{row['first_step_seconds']:>13.1f}"
        )


def has_transformers() -> bool:
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="rounds after warm-up")
    parser.add_argument("--fp8", action="store_true", help="our FP8 step too")
    parser.add_argument("--only", nargs="*", choices=NAMES, help="contenders to run")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--contender", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.contender:
        contend(options.contender, options.threads)
        return 0
    names = options.only or [n for n in NAMES if n != "ours_fp8" or options.fp8]
    if not has_transformers():
        print("transformers is not installed: no peers, our own numbers only (pip install transformers)")
        names = [n for n in names if n.startswith("ours")]
    result = measure(names, threads=options.threads, steps=options.steps)
    show(result, names)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
