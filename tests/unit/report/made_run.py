"""Makes run folders as training leaves them, with curves that look like real ones; also a script to look at a page.

    python -m tests.unit.report.made_run OUT_DIR     writes OUT_DIR/{bf16,fp8} and OUT_DIR/report/report.html
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megafp8.checkpoint import save
from megafp8.core.layout import Layout
from megafp8.parallel.mesh import Mesh
from megafp8.report import build

TOKENS_PER_STEP = 16 * 256
ENTROPY = 6.214
GEMMS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
CONFIG = """[run]
dir = "runs/{name}"  # default: "(none)"
name = ""
seed = 1234

[model]
family = "llama"
num_layers = {layers}  # default: "(none)"
hidden_size = 256  # default: "(none)"

[data]
train = [{{ path = "runs/corpus/train" }}]  # default: []
tokenizer = "runs/tokenizer/tokenizer.model"  # default: ""
sequence_length = 256  # default: 2048

[train]
steps = {steps}  # default: "(none)"
global_batch = 16  # default: "(none)"
micro_batch = 4  # default: 1

[precision]
dtype = "bf16"
recipe = {recipe}
"""


def make_run(
    folder: Path,
    *,
    recipe: str = "none",
    steps: int = 300,
    layers: int = 4,
    seed: int = 0,
    checkpoint: bool = True,
    what_if: bool = False,
) -> Path:
    """Write a run folder. The noise of the losses is the same for every recipe, as it is for runs on the same data."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, common = np.random.default_rng([seed, recipe != "none"]), np.random.default_rng(7)
    records = _train_records(steps, recipe != "none", rng, common)
    if recipe != "none":
        records += [fp8_record(step, layers, rng, what_if=what_if) for step in range(10, steps + 1, 10)]
    records += [_event(step, "saved", seconds=0.21) for step in range(50, steps + 1, 50)]
    if recipe != "none" and steps > 180:
        records += [_event(172, "preempted", signal="SIGTERM"), _event(172, "resumed")]
        origin = (
            "first not finite: grad_output of layers.1.mlp.down, backward, micro-batch 0, rank 1: 3 NaN and 0 infinite "
            "of 1048576 values"
        )
        records += [_event(97, "skipped", origin=origin)]
    lines = [json.dumps(record) for record in sorted(records, key=lambda r: r["step"])]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    counts = {} if recipe == "none" else share(recipe, layers)
    (folder / "run.json").write_text(json.dumps({**facts(folder.name), "fp8": counts}))
    setting = '"none"' if recipe == "none" else f'"{recipe}"  # default: "none"'
    text = CONFIG.format(name=folder.name, steps=steps, layers=layers, recipe=setting)
    (folder / "config.toml").write_text(text)
    if checkpoint:
        save_weights(folder, steps, layers, seed)
    return folder


def _train_records(steps: int, fp8: bool, rng: Any, common: Any) -> list[dict[str, Any]]:
    step = np.arange(1, steps + 1)
    trend = 3.35 + 5.7 * np.exp(-step / 14) + 1.75 * np.exp(-step / 110)
    loss = trend + common.normal(0, 0.055, steps) + (0.004 + rng.normal(0, 0.006, steps) if fp8 else 0.0)
    seconds = rng.gamma(400, (1.30 if fp8 else 0.88) / 400, steps)
    seconds[0] += 1.2
    spent, records = 0.0, []
    for i in range(steps):
        spent += seconds[i]
        speed = TOKENS_PER_STEP / seconds[i]
        records.append(
            {
                "kind": "train", "step": i + 1, "consumed_samples": 16 * (i + 1),
                "consumed_tokens": TOKENS_PER_STEP * (i + 1), "loss": float(loss[i]),
                "grad_norm": float(1.1 + rng.gamma(2, 0.1)), "lr": 3e-3, "step_seconds": float(seconds[i]),
                "tokens_per_second": float(speed), "tflops_causal": speed * 31.6e6 / 2e12,
                "tflops_full": speed * 33.2e6 / 2e12, "mfu_causal": speed * 31.6e6 / 2 / 220e9,
                "mfu_full": speed * 33.2e6 / 2 / 220e9, "skipped": 0, "nan": 0, "memory_bytes": 911_000_000 + 4096 * i,
                "run_seconds": spent * 1.06, "goodput": 0.94,
            }
        )  # fmt: skip
        if (i + 1) % 50 == 0 or i + 1 == steps:
            valid = float(trend[i] + 0.11 + (0.003 if fp8 else 0.0))
            record = {"loss": valid, "perplexity": float(np.exp(valid)), "tokens": 32768}
            records.append({"kind": "eval", "step": i + 1, "name": "valid", **record})
    return records


def fp8_record(step: int, layers: int, rng: Any, *, what_if: bool = False) -> dict[str, Any]:
    """Statistics of all GEMMs: gradients underflow most and more so in later layers, weights hardly ever."""
    stats: dict[str, float] = {}
    for layer in range(layers):
        for number, gemm in enumerate(GEMMS):
            for role, level in (("input", 0.02), ("weight", 0.0008), ("grad_output", 0.4)):
                size = level * (1 + layer) * (1 + 0.6 * number) * (1 + step / 200) * rng.gamma(4, 0.25)
                name = f"layers.{layer}.{gemm}.{role}"
                stats[f"{name}.underflows%"] = float(size)
                burst = rng.random() < 0.12 and role != "weight"
                stats[f"{name}.overflows%"] = float(rng.gamma(1, 0.004)) if burst else 0.0
                stats[f"{name}.cur_amax"], stats[f"{name}.scale"] = 3.1, 144.5
                stats[f"{name}.amax_ratio"] = float(np.exp2(rng.normal(-0.6, 0.5)))
                stats[f"{name}.mse"] = 1e-7 * size
                if what_if:
                    stats[f"{name}.mxfp8_underflows%"], stats[f"{name}.mxfp8_mse"] = 0.02 * size, 6e-8 * size
                    stats[f"{name}.nvfp4_underflows%"], stats[f"{name}.nvfp4_mse"] = 4.0 + 20 * size, 3e-6 * size
    return {"kind": "fp8", "step": step, "stats": stats}


def add_heldout(folder: Path, name: str, shift: float = 0.0, documents: int = 60, seed: int = 3) -> None:
    """What `megafp8 eval --save` leaves: documents of one hardness for every run, `shift` nats a token worse."""
    common, own = np.random.default_rng(seed), np.random.default_rng([seed, len(folder.name)])
    tokens = common.integers(100, 1500, documents)
    losses = tokens * (3.5 + common.normal(0, 0.4, documents) + shift + own.normal(0, 0.004, documents))
    (folder / "heldout").mkdir(exist_ok=True)
    kept = {
        "kind": "megafp8-document-losses", "name": name, "arithmetic": "bf16", "checkpoint": "step_00000200",
        "data_checksum": f"xxh3_128:{seed}", "data_tokens": int(tokens.sum()), "window": 256, "max_tokens": 0,
        "bits_per_byte": 1.9, "document_loss_sums": losses.tolist(), "document_tokens": tokens.tolist(),
    }  # fmt: skip
    (folder / "heldout" / f"{name}.json").write_text(json.dumps(kept))


def _event(step: int, name: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "step": step, "event": name, **fields}


def share(recipe: str, layers: int) -> dict[str, Any]:
    """The counts of a run whose first layer is not in FP8."""
    number = len(GEMMS) * layers
    return {
        "gemms": 3 * number, "fp8_gemms": 3 * (number - len(GEMMS)), "recipes": {recipe: number - len(GEMMS)},
        "not_fp8": [f"layers.0.{gemm}" for gemm in GEMMS],
    }  # fmt: skip


def facts(name: str) -> dict[str, Any]:
    """run.json."""
    return {
        "name": name, "code_version": "0.1.0+b030cf4", "python": "3.11.7", "torch": "2.13.0+cpu",
        "platform": "Linux-6.1", "device": "cpu", "cpu": "AMD EPYC", "command": ["megafp8", "pretrain", "x.toml"],
        "mesh": {"pp": 1, "dp": 2, "cp": 1, "tp": 1, "ep": 1}, "world_size": 2, "threads": 1, "peak_flops": 220e9,
        "peak_source": "measured here: best 1024^3 bfloat16 product, 1 thread(s) a rank", "num_parameters": 5_245_184,
        "flops_per_token_causal": 31.6e6, "flops_per_token_full": 33.2e6, "unigram_entropy_nats": ENTROPY,
        "train_tokens": 1_403_221, "started": "2026-11-30T07:00:00+0000",
        "tokenizer": {"kind": "sentencepiece", "fingerprint": "9f" * 32, "vocab_size": 8192, "path": "x.model"},
    }  # fmt: skip


def save_weights(folder: Path, step: int, layers: int, seed: int) -> None:
    """A checkpoint with fp32 masters: normal, with a few larger ones as trained layers have."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(zip(GEMMS, ((512, 256), (256, 256), (2, 704, 256), (256, 704))))
    tensors = {"optimizer.master.final_norm.weight": torch.ones(256)}
    for layer in range(layers):
        for gemm, shape in shapes.items():
            weight = 0.02 * torch.randn(shape, generator=generator)
            weight *= 1 + 2 * torch.rand(shape[-1], generator=generator) ** 8
            tensors[f"optimizer.master.layers.{layer}.{gemm}.weight"] = weight
    layouts = {name: Layout(shape=tuple(tensor.shape), split={}) for name, tensor in tensors.items()}
    save(folder / "checkpoints", step, tensors, layouts, Mesh.single(), {"step": step})


if __name__ == "__main__":
    out = Path(sys.argv[1])
    page = build([make_run(out / "bf16"), make_run(out / "fp8", recipe="delayed", what_if=True)], out / "report")
    sys.stdout.write(f"{page}\n")
