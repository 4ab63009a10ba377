"""`megafp8 checkpoint`: look at a run's checkpoints, verify, compare and copy them, thin them out.

No torch, but where values are compared: `diff`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "list, show, verify, compare, copy or prune the checkpoints of a run"
EPILOG = """examples:
  megafp8 checkpoint ls runs/tiny-fp8                      every step, newest first, complete or why not
  megafp8 checkpoint show runs/tiny-fp8                    tensors and meta of the newest complete one
  megafp8 checkpoint verify runs/tiny-fp8/checkpoints/step_00000100
  megafp8 checkpoint verify runs/tiny-fp8                  every byte of all of them against the checksums
  megafp8 checkpoint diff runs/a runs/b                    tensors whose bits differ, by how much; other meta
  megafp8 checkpoint copy runs/a backup                    the newest of runs/a as backup/step_..., verified
  megafp8 checkpoint copy runs/a weights --only 'optimizer.master.*'
  megafp8 checkpoint prune runs/tiny-fp8 --keep-last 1     --dry-run only says what would go

Exit code 0 if all is well, 4 if a checkpoint is missing or damaged, or if the tensors of two differ."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("action", choices=tuple(_ACTIONS), help="what to do")
    parser.add_argument("path", metavar="RUN", help="a run's folder, its checkpoints folder, or one checkpoint")
    parser.add_argument(
        "other", metavar="OTHER", nargs="?", help="diff: what to compare with; copy: the folder to copy into"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="copy: tensors whose names match; may be repeated",
    )
    parser.add_argument(
        "--keep-last", type=int, metavar="N", help="prune: newest to keep (default: as the run says, or 2)"
    )
    parser.add_argument("--keep-every", type=int, metavar="N", help="prune: also keep multiples of this step")
    parser.add_argument("--dry-run", action="store_true", help="prune: only say what would go")


def run(args: argparse.Namespace) -> int:
    """Do one action."""
    from megafp8.core.errors import ConfigError

    takes_two = args.action in ("diff", "copy")
    if takes_two != (args.other is not None):
        raise ConfigError(f"checkpoint {args.action} takes {'two paths' if takes_two else 'one path'}; see --help")
    return _ACTIONS[args.action](args)


def _root(path: str) -> Path:
    """The folder that holds the checkpoints of `path`."""
    from megafp8.checkpoint.folders import candidates
    from megafp8.core.errors import CheckpointError

    for root in (Path(path) / "checkpoints", Path(path)):
        if candidates(root):
            return root
    raise CheckpointError(f"{path}: holds no checkpoints; give a run's folder (the one with config.toml)")


def _is_one(path: str) -> bool:
    from megafp8.checkpoint.manifest import MANIFEST_NAME

    return (Path(path) / MANIFEST_NAME).is_file()


def _ls(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from megafp8.checkpoint.folders import candidates, check, damaged, step_of
    from megafp8.core.errors import CheckpointError

    root = _root(args.path)
    table = Table("step", "tensors", "size", "files", "state", box=None, pad_edge=False)
    broken = 0
    for folder in candidates(root):
        try:
            manifest = check(folder)
        except CheckpointError as error:
            broken += 1
            table.add_row(str(step_of(folder)), "", "", "", f"[red]{error}[/red]")
            continue
        size = f"{manifest.bytes / 1e6:.1f} MB"
        table.add_row(str(manifest.step), str(len(manifest.tensors)), size, str(len(manifest.files)), "complete")
    for folder in damaged(root):
        step = folder.name.removeprefix("step_").partition(".")[0]
        table.add_row(str(int(step)), "", "", "", f"damaged, set aside as {folder.name}")
    Console().print(table)
    return CheckpointError.exit_code if broken else 0


def _show(args: argparse.Namespace) -> int:
    import json

    from rich.console import Console
    from rich.table import Table

    from megafp8.checkpoint.folders import check, find

    folder = find(args.path)
    manifest = check(folder)
    table = Table("tensor", "dtype", "shape", "pieces", box=None, pad_edge=False)
    for name, entry in manifest.tensors.items():
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        table.add_row(name, entry.dtype, shape, str(len(entry.pieces)))
    Console().print(table)
    print("meta", json.dumps(manifest.meta, indent=1, ensure_ascii=False))
    print(f"{folder}: step {manifest.step}, {len(manifest.tensors)} tensors, {manifest.bytes / 1e6:.1f} MB")
    return 0


def _verify(args: argparse.Namespace) -> int:
    import sys
    import time

    from megafp8.checkpoint.folders import candidates, verify
    from megafp8.core.errors import CheckpointError

    broken = 0
    for folder in [Path(args.path)] if _is_one(args.path) else candidates(_root(args.path)):
        start = time.monotonic()
        try:
            manifest = verify(folder)
        except CheckpointError as error:
            broken += 1
            print(f"megafp8 checkpoint: error: {error}", file=sys.stderr)
            continue
        rate = manifest.bytes / 1e6 / max(time.monotonic() - start, 1e-6)
        print(f"{folder}: intact, {len(manifest.files)} files, {manifest.bytes / 1e6:.1f} MB, {rate:.0f} MB/s")
    return CheckpointError.exit_code if broken else 0


def _prune(args: argparse.Namespace) -> int:
    from megafp8.checkpoint.config import CheckpointConfig
    from megafp8.checkpoint.retention import prune, surplus
    from megafp8.core.config import build, load_toml

    root = _root(args.path)
    said = root.parent / "config.toml"
    values = dict(load_toml(said).get("checkpoint", {})) if said.is_file() else {}
    asked = {"keep_last": args.keep_last, "keep_every": args.keep_every}
    config = build(CheckpointConfig, {**values, **{k: v for k, v in asked.items() if v is not None}})
    gone = surplus(root, config) if args.dry_run else prune(root, config)
    for folder in gone:
        print(f"{folder}: {'would go' if args.dry_run else 'deleted'}")
    print(f"{len(gone)} of the complete checkpoints {'would go' if args.dry_run else 'deleted'}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from megafp8.checkpoint.compare import compare
    from megafp8.checkpoint.folders import find
    from megafp8.core.errors import CheckpointError

    first, second = find(args.path), find(args.other)
    found = compare(first, second)
    if found.tensors:
        table = Table("tensor", "differing", "largest", "relative", "", box=None, pad_edge=False)
        for one in found.tensors:
            share = f"{one.differing} of {one.elements}" if one.differing >= 0 else ""
            numbers = (f"{one.largest:.3g}", f"{one.relative:.3g}") if one.differing >= 0 else ("", "")
            table.add_row(one.name, share, *numbers, one.what)
        Console(width=max(80, Console().width)).print(table)
    for names, where in ((found.first_only, first), (found.second_only, second)):
        for name in names:
            print(f"{name}: only in {where}")
    for key, (a, b) in found.meta.items():
        print(f"meta {key}: {a!r}, {b!r}")
    only = f"{len(found.first_only)} and {len(found.second_only)} are in one only"
    print(f"{first}, {second}: {found.equal} tensors are equal bit for bit, {len(found.tensors)} differ, {only}")
    return 0 if found.same else CheckpointError.exit_code


def _copy(args: argparse.Namespace) -> int:
    from megafp8.checkpoint.copies import copy
    from megafp8.checkpoint.folders import find
    from megafp8.train.lock import RunLock

    source, root = find(args.path), Path(args.other)
    lock = RunLock(root.parent)
    if (root.parent / "config.toml").is_file():  # a run's checkpoints: nobody else may write there meanwhile
        lock.acquire()
    try:
        made = copy(source, root, args.only)
    finally:
        lock.release()
    print(f"{made}: copied from {source}, every byte verified")
    return 0


_ACTIONS = {"ls": _ls, "show": _show, "verify": _verify, "diff": _diff, "copy": _copy, "prune": _prune}
