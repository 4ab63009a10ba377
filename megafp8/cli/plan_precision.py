"""`megafp8 plan --precision`: a table of every GEMM, or the same as JSON."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from megafp8.plan.gemm_table import Gemm, GemmPlan


def show(console: Console, args: argparse.Namespace) -> None:
    """Print the plan, then raise ConfigError with all that a run of this configuration would be refused for."""
    import json

    from megafp8.core.errors import ConfigError
    from megafp8.models.config import check_model
    from megafp8.parallel.mesh_config import check_mesh
    from megafp8.plan.gemm_table import plan_gemm_table, sharded_note
    from megafp8.train.check import smallest_world
    from megafp8.train.config import check_run, load_run_config

    config = load_run_config(args.config, args.overrides)
    world, p = args.world or smallest_world(config), config.parallel
    problems = check_run(config, world)
    # a table of dims needs a mesh that splits them
    cut = check_mesh(p, world) or check_model(config.model, tp=p.tp, ep=p.ep, etp=p.etp)
    if cut:
        raise ConfigError("\n".join(problems))
    sequence, micro_batch = config.data.sequence_length, config.train.micro_batch
    plan = plan_gemm_table(
        config.model, config.precision, p, world=world, micro_batch=micro_batch, sequence_length=sequence
    )
    shown = plan if args.all else plan.collapsed()
    if args.json:
        print(json.dumps({**shown.as_json(), "problems": problems}, indent=1, ensure_ascii=False))
    else:
        _print(console, shown)
        used = {gemm.recipe for gemm in plan.gemms if gemm.in_fp8}
        shard = micro_batch * sequence // p.cp // (p.tp if p.sequence_parallel else 1)
        note = sharded_note(config.precision, sorted(used), shard)
        if note:
            console.print(note, soft_wrap=True)
    if problems:
        raise ConfigError("\n".join(problems))


def _print(console: Console, plan: GemmPlan) -> None:
    from rich.table import Table

    table = Table(
        "layers", "linear", "tokens", "in", "out", "recipe", "forward", "backward", "scales of", "backend, or why not",
        box=None, pad_edge=False, header_style="dim",
    )  # fmt: skip
    for gemm in plan.gemms:
        table.add_row(*_row(gemm))
    console.print(table)
    fp8, total = plan.counts
    console.print(
        f"{fp8} of {total} GEMMs of the linears are in FP8 (three each), with {plan.fp8_share:.1%} of the "
        "model's FLOPs (attention halved for the mask)",
        soft_wrap=True,
    )
    if plan.backend:
        console.print(f"backend {plan.backend}: {plan.backend_reason}", soft_wrap=True)


def _row(gemm: Gemm) -> tuple[str, ...]:
    name = gemm.name if gemm.matrices == 1 else f"{gemm.name} x {gemm.matrices}"
    dims = (str(gemm.in_features), str(gemm.out_features)) if gemm.in_features else ("-", "-")
    rows = str(gemm.rows) if gemm.rows else "as routed"
    formats = (gemm.forward or "-", gemm.backward or "-", gemm.scales or "-")
    return gemm.layers_shown or "-", name, rows, *dims, gemm.recipe, *formats, gemm.backend or gemm.why
