"""`megafp8 bench-inference`: throughput against latency over batch sizes, of our engine and of servers."""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megafp8.infer.server_speed import Server
    from megafp8.infer.sweep import Curve, Point, Workload

HELP = "throughput against latency over batch sizes: a checkpoint in BF16 and FP8, or a server"
EPILOG = """examples:
  megafp8 bench-inference RUN --recipes none,current --batches 1,2,4,8,16,32 --budget-ms 50
  megafp8 bench-inference --url http://localhost:8000 --model llama-fp8 --batches 1,8,64 --budget-ms 30
  megafp8 bench-inference --url http://a:8000 --model bf16 --url http://b:8000 --model fp8      two curves, one plot
  torchrun --nproc-per-node 2 -m megafp8 bench-inference RUN      tensor parallel

Writes bench.json, latency.png and latency.svg into --out and prints a table. A server is one with OpenAI's interface
(TensorRT-LLM, vLLM, SGLang); its batch size is the number of requests that it has at once. On a CPU FP8 is emulated:
its values are exact, its speed says nothing about a GPU."""

EMULATED = "FP8 is emulated here: its values are exact, its speed says nothing about a GPU with FP8"
_LABELS = {"none": "", "current": "FP8 current", "blockwise": "FP8 blockwise", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("path", nargs="?", metavar="CHECKPOINT_OR_RUN", help="measure it in our own engine")
    parser.add_argument("--recipes", default="none", metavar="A,B", help="FP8 recipes as in generate (default none)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="to compute in (default bf16)")
    parser.add_argument("--tokenizer", metavar="PATH", help="its file, if it has moved since training")
    parser.add_argument("--url", action="append", default=[], help="measure a server; may be given several times")
    parser.add_argument("--model", action="append", default=[], metavar="NAME", help="of each --url, as it is served")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="of a silent server (default 120)")
    parser.add_argument("--batches", default="1,2,4,8,16", metavar="A,B", help="batch sizes (default 1,2,4,8,16)")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="of each request (default 128)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="of each request (default 128)")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="rounds not counted (default 1)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds counted (default 3)")
    parser.add_argument("--budget-ms", type=float, metavar="MS", help="time per token: how much throughput fits?")
    parser.add_argument("--seed", type=int, help="of the prompts (default: another each time, past a server's cache)")
    parser.add_argument("--out", default="bench-inference", metavar="DIR", help="folder (default bench-inference)")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write JSON and plot."""
    from megafp8.infer.server_speed import check_server

    batches, recipes, workload, servers = _asked(args)
    out = _folder(args.out)
    for server in servers:
        check_server(server)
    curves, rank = _engine_curves(args, recipes, workload, batches) if args.path else ([], 0)
    if rank > 0:
        return max((curve.error.exit_code for curve in curves if curve.error is not None), default=0)
    if args.seed is None:  # of servers alone: the ranks of our engine must agree on their prompts
        workload = replace(workload, seed=secrets.randbelow(1 << 31))
    curves += _server_curves(servers, workload, batches)
    failed = next((curve.error for curve in curves if curve.error is not None), None)
    if failed is not None and not any(curve.points for curve in curves):
        raise failed
    print(_table(curves, workload, args.budget_ms))
    _keep(out, curves, workload, args)
    return failed.exit_code if failed is not None else 0


def _asked(args: argparse.Namespace) -> tuple[list[int], list[str], Workload, list[Server]]:
    """What the words ask for; everything that is wrong with them at once."""
    from megafp8.core.errors import ConfigError
    from megafp8.infer.server_speed import Server
    from megafp8.infer.sweep import Workload

    problems: list[str] = []

    def tried(make: Any) -> Any:
        try:
            return make()
        except ConfigError as error:
            problems.append(str(error))

    batches = tried(lambda: _batches(args.batches))
    recipes = tried(lambda: _recipes(args.recipes))
    workload = tried(lambda: Workload(args.prompt_tokens, args.new_tokens, args.warmup, args.repeats, args.seed or 0))
    if not args.path and not args.url:
        problems.append("measure what? give CHECKPOINT_OR_RUN, or --url http://HOST:PORT --model NAME")
    if len(args.url) != len(args.model):
        problems.append(
            f"--url is given {len(args.url)} and --model {len(args.model)} times; a server needs one of each"
        )
    pairs = zip(args.url, args.model, strict=False)
    servers = [tried(partial(Server, url, name, args.timeout)) for url, name in pairs]
    if args.budget_ms is not None and not args.budget_ms > 0:
        problems.append(f"--budget-ms {args.budget_ms:g}: above 0 ms, e.g. 50")
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return batches, recipes, workload, servers


def _batches(words: str) -> list[int]:
    from megafp8.core.errors import ConfigError

    try:
        found = sorted({int(word) for word in words.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise ConfigError(f"--batches {words!r}: whole numbers from 1 up with commas between, e.g. 1,2,4,8")
    return found


def _recipes(words: str) -> list[str]:
    from megafp8.cli.judging import RECIPES
    from megafp8.core.config import nearest
    from megafp8.core.errors import ConfigError

    found = list(dict.fromkeys(words.split(",")))
    for word in found:
        if word not in RECIPES:
            raise ConfigError(f"--recipes {words!r}: {word!r} is none of {', '.join(RECIPES)}{nearest(word, RECIPES)}")
    return found


def _folder(path: str) -> Path:
    """Made before anything is measured: an hour's figures should not meet a folder that cannot be written."""
    from megafp8.core.jsonio import resource_error

    out = Path(path)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise resource_error(error, out) from error
    return out


def _engine_curves(
    args: argparse.Namespace, recipes: Sequence[str], workload: Workload, batches: Sequence[int]
) -> tuple[list[Curve], int]:
    """The curve of each recipe, and this process's rank."""
    from megafp8.checkpoint import find
    from megafp8.cli.judging import load_on
    from megafp8.core.errors import MegaError
    from megafp8.infer.engine_speed import check_fits, is_emulated, measure_engine
    from megafp8.infer.ranks import device_here, inference_mesh
    from megafp8.infer.sweep import Curve, run_sweep
    from megafp8.infer.weights import model_config

    path = find(args.path)
    check_fits(model_config(path), workload)
    mesh, curves = inference_mesh(path, os.environ), []
    for recipe in recipes:
        label, dtype = _label(path, recipe, args.dtype)
        facts = {"engine": "megafp8", "checkpoint": str(path), "dtype": dtype, "recipe": recipe, "tp": mesh.world}
        facts |= {"device": device_here(), "seed": workload.seed}
        curve = Curve(label, facts)
        curves.append(curve)
        try:
            model = load_on(mesh, args, recipe).model
        except MegaError as error:  # this recipe cannot be; the others may
            curve.error, curve.failure = error, "; ".join(str(error).splitlines())
            continue
        curve.emulated = is_emulated(model)
        run_sweep(curve, batches, _said(label, partial(measure_engine, model, workload), mesh.rank))
        del model  # before the next one is loaded: two at once may not fit
    return curves, mesh.rank


def _said(label: str, measure: Callable[[int], Point], rank: int = 0) -> Callable[[int], Point]:
    """`measure`, which says on stderr what it is at: a sweep takes minutes."""

    def measured(batch: int) -> Point:
        if rank == 0:
            print(f"{label}: batch {batch}", file=sys.stderr)
        return measure(batch)

    return measured


def _label(path: Path, recipe: str, dtype: str) -> tuple[str, str]:
    """How a curve is called, and the dtype that it computes in."""
    from megafp8.checkpoint import read_meta

    if recipe != "as-trained":
        return _LABELS[recipe] or dtype.upper(), dtype
    trained = read_meta(path).get("config", {}).get("precision", {})
    dtype = trained.get("dtype", "bf16")
    kept = trained.get("recipe", "none")
    return f"as trained ({dtype.upper() if kept == 'none' else kept})", dtype


def _server_curves(servers: Sequence[Server], workload: Workload, batches: Sequence[int]) -> list[Curve]:
    from megafp8.infer.server_speed import measure_server
    from megafp8.infer.sweep import Curve, run_sweep

    names, curves = [server.model for server in servers], []
    for server in servers:
        label = server.model if names.count(server.model) == 1 else f"{server.model} at {server.place}"
        curve = Curve(label, {"engine": "server", "url": server.url, "model": server.model, "seed": workload.seed})
        curves.append(run_sweep(curve, batches, _said(label, partial(measure_server, server, workload))))
    return curves


def _table(curves: Sequence[Curve], workload: Workload, budget_ms: float | None) -> str:
    """The lines of the table, and what must be said about them."""
    from megafp8.infer.sweep import capacity
    from megafp8.report.latency_figure import capacity_words

    wide = max(9, *(len(curve.label) for curve in curves))
    lines = [
        f"{workload.prompt_tokens} tokens of prompt, {workload.new_tokens} new, {workload.repeats} rounds",
        f"{'precision':{wide}}  batch  first token ms  per token ms   p90 ms    tokens/s",
    ]
    for curve in curves:
        for p in curve.points:
            mark = "  emulated" if curve.emulated else ""
            lines.append(
                f"{curve.label:{wide}}  {p.batch:5}  {1e3 * p.first_token:14.2f}  {1e3 * p.token:12.2f}  "
                f"{1e3 * p.token_p90:7.2f}  {p.tokens_per_second:10.1f}{mark}"
            )
        short = [p for p in curve.points if p.new_tokens < workload.new_tokens]
        lines += [f"{curve.label}, batch {p.batch}: rows ended after {p.new_tokens:.1f} tokens" for p in short]
        lines += (
            [f"{curve.label}: {'no further' if curve.points else 'not measured'}, {curve.failure}"]
            if curve.failure
            else []
        )
    for curve in [one for one in curves if one.points] if budget_ms is not None else ():
        found = capacity(curve.points, budget_ms / 1e3) if budget_ms is not None else None
        best = min(curve.points, key=lambda p: p.token)
        words = f"; the fastest is batch {best.batch} with {1e3 * best.token:.2f} ms" if found is None else ""
        near = f" at batch {found.batch:.3g}, {1e3 * found.token:.4g} ms" if found is not None else words
        lines.append(f"{curve.label}: within {budget_ms:g} ms a token {capacity_words(found)}{near}")
    return "\n".join([*lines, *([EMULATED] if any(curve.emulated for curve in curves) else [])])


def _keep(out: Path, curves: Sequence[Curve], workload: Workload, args: argparse.Namespace) -> None:
    """Write bench.json and both forms of the plot."""
    from megafp8.core.jsonio import write_atomic, write_json
    from megafp8.infer.sweep import capacity
    from megafp8.report.latency_figure import latency_figure, standalone_svg

    budget = args.budget_ms / 1e3 if args.budget_ms is not None else None
    records = []
    for curve in curves:
        found = capacity(curve.points, budget) if budget is not None else None
        records.append(
            {
                "label": curve.label, **curve.facts, "emulated": curve.emulated, "failure": curve.failure,
                "points": [asdict(point) for point in curve.points],
                "capacity": asdict(found) if found is not None else None,
            }
        )  # fmt: skip
    emulated = any(curve.emulated for curve in curves)
    note = EMULATED if emulated else ""
    record = {"machine": _machine(), "workload": asdict(workload), "budget_ms": args.budget_ms, "note": note}
    write_json(out / "bench.json", {**record, "unit": "seconds", "curves": records})
    title = f"Throughput against latency: {workload.prompt_tokens} tokens of prompt, {workload.new_tokens} new"
    picture = latency_figure([curve for curve in curves if curve.points], title, budget_seconds=budget, note=note)
    write_atomic(out / "latency.png", picture.png)
    write_atomic(out / "latency.svg", standalone_svg(picture).encode())
    for name in ("bench.json", "latency.png", "latency.svg"):
        print(out / name)


def _machine() -> dict[str, Any]:
    """Where this ran; for a server that is the client's side."""
    import torch

    from megafp8.train.setup import code_version
    from megafp8.train.telemetry import cpu_name

    return {
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "code_version": code_version(),
    }
