"""What `generate`, `eval` and `bench-inference` share: which model, in which arithmetic, on how many processes."""

from __future__ import annotations

import argparse
import os
from typing import Any

RECIPES = ("none", "as-trained", "current", "blockwise", "mxfp8", "nvfp4")


def add_model_arguments(parser: argparse.ArgumentParser, *, dtype: str) -> None:
    """The checkpoint, and in what to compute."""
    parser.add_argument("path", metavar="CHECKPOINT_OR_RUN", help="a checkpoint, or a run (its newest complete one)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default=dtype, help=f"to compute in (default {dtype})")
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="none",
        help="FP8 of the layers' linears: as-trained takes dtype, recipe and scales of the run, the others make their "
        "own scales (default none)",
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="its file, if it has moved since training")


def load(args: argparse.Namespace) -> tuple[Any, int]:
    """The model that `add_model_arguments` asks for, on this process's share of the ranks, and its rank."""
    from megafp8.infer.ranks import inference_mesh

    mesh = inference_mesh(args.path, os.environ)
    return load_on(mesh, args, args.recipe), mesh.rank


def load_on(mesh: Any, args: argparse.Namespace, recipe: str) -> Any:
    """The model in `recipe`, on ranks that have met; dtype and tokenizer as asked for."""
    from megafp8.infer.ranks import device_here
    from megafp8.infer.weights import DTYPES, load_model

    return load_model(
        args.path,
        dtype=DTYPES[args.dtype],
        recipe=recipe.replace("-", " "),
        device=device_here(),
        tokenizer=args.tokenizer,
        mesh=mesh,
    )
