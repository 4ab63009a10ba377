"""Copies of the same values on several ranks are equal bit for bit; where they are not, something has broken silently.

A flipped bit on one data-parallel replica changes no shape and raises nothing: that replica's gradients are of another
model from then on. Fingerprints of weights and optimizer state find it.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megafp8.core.errors import CorruptionError
from megafp8.core.layout import Layout, layout_of
from megafp8.parallel.collectives import all_reduce_, merge_dicts
from megafp8.parallel.mesh_config import RANK_ORDER
from megafp8.train.setup import Parts

_ROW = 1024


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Two int64 sums [2] over the bits of `tensor`: any single changed bit changes the first.

    The second weighs rows of 8 KiB by their place, so that rows which have changed places show too.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.data_ptr() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))  # a copy, and so aligned
    words = data.view(torch.int64)  # sums wrap around, which loses nothing
    whole = words[: words.numel() // _ROW * _ROW].view(-1, _ROW).sum(1)
    rest = words[words.numel() // _ROW * _ROW :].sum()
    weights = torch.arange(3, 3 + 2 * whole.numel(), 2, dtype=torch.int64, device=whole.device)
    return torch.stack([whole.sum() + rest, (whole * weights).sum() + rest])


@dataclass(frozen=True)
class _Copy:
    """What one rank reports of a tensor that differs."""

    rank: int
    host: str
    bits: tuple[int, int]
    place: str  # which piece of the global tensor
    as_master: bool | None  # whether a weight is the rounding of this rank's master; None: not known


def check_replicas(parts: Parts, step: int, saved: int | None) -> None:
    """Compare every replicated tensor over the ranks that hold copies of it; collective.

    Args:
        saved: the step of the newest checkpoint, None: there is none.

    Raises:
        CorruptionError: copies differ, on every rank; names the tensors and, by majority, the ranks.
    """
    parts.optimizer.wait()
    tensors = _tensors(parts)
    by_axes: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, (_, layout) in tensors.items():
        by_axes[layout.copy_axes].append(name)
    prints: dict[str, torch.Tensor] = {}
    differ: set[str] = set()
    for axes, names in sorted(by_axes.items()):
        group = parts.mesh.group_of(axes)
        if group is None:
            continue
        mine = torch.stack([fingerprint(tensors[name][0]) for name in names])
        low, high = all_reduce_(mine.clone(), group, "min"), all_reduce_(mine.clone(), group, "max")
        prints |= dict(zip(names, mine.cpu(), strict=True))
        differ |= {name for name, same in zip(names, (low == high).all(1).tolist(), strict=True) if not same}
    parts.optimizer.drop_copies()
    broken = torch.tensor([float(bool(differ))])
    if all_reduce_(broken, parts.mesh.group_of(RANK_ORDER), "max").item():
        found = {str(parts.mesh.rank): _copies(parts, tensors, prints, differ)}
        copies = merge_dicts(found, parts.mesh.group_of(RANK_ORDER))
        raise CorruptionError(explain(step, saved, [c for part in copies.values() for c in part]))


def _tensors(parts: Parts) -> dict[str, tuple[torch.Tensor, Layout]]:
    """Weights in the dtype of computing, and optimizer state, by name."""
    found = {}
    for name, param in parts.named_parameters:
        if not isinstance(param, DTensor) and not getattr(param, "in_codes", False):
            found[f"weight {name}"] = (param.detach(), layout_of(param))
    state, layouts = parts.optimizer.tensors(), parts.optimizer.layouts()
    places = {weight.data_ptr() for weight, _ in found.values()}  # masters of fp32 weights are those weights
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor) and tensor.data_ptr() not in places:
            found[name] = (tensor, layouts[name])
    return found


def _copies(
    parts: Parts, tensors: dict[str, Any], prints: dict[str, torch.Tensor], differ: set[str]
) -> list[tuple[str, _Copy]]:
    host, rank, copies = socket.gethostname(), parts.mesh.rank, []
    for name in sorted(differ):
        tensor, layout = tensors[name]
        master = tensors.get(f"optimizer.master.{name.partition(' ')[2]}")
        same = None
        if master is not None and master[0].shape == tensor.shape and master[0].dtype != tensor.dtype:
            same = bool(torch.equal(master[0].to(tensor.dtype), tensor))
        bits = tuple(prints[name].tolist())
        place = str(layout.local_slices(parts.mesh))
        copies.append((name, _Copy(rank, host, bits, place, same)))
    return copies


def explain(step: int, saved: int | None, copies: list[tuple[str, _Copy]]) -> str:
    """One line: which tensors differ, on which ranks, and how to go on."""
    by_tensor: dict[tuple[str, str], list[_Copy]] = defaultdict(list)
    for name, copy in copies:
        by_tensor[name, copy.place].append(copy)
    parts = [f"{name} on {guilty_ranks(group)}" for (name, _), group in sorted(by_tensor.items())]
    more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
    back = "nothing was saved yet" if saved is None else f"the newest checkpoint is of step {saved}, before it was seen"
    return (
        f"step {step}: copies of the same values differ: {'; '.join(parts[:4])}{more}; {back}. Run the same command "
        "again to go on from there, without that host if it happens again"
    )


def guilty_ranks(copies: list[_Copy]) -> str:
    """The ranks that hold something else than most, or than their own master says; all of them where neither tells."""
    counts = Counter(copy.bits for copy in copies).most_common()
    minority = [copy for copy in copies if copy.bits != counts[0][0]]
    if len(counts) > 1 and counts[0][1] == counts[1][1]:  # as many against as many
        off = [copy for copy in copies if copy.as_master is False]
        minority = off if 0 < len(off) < len(copies) else copies
    ranks = [copy.rank for copy in minority]
    word = "one of ranks" if len(minority) == len(copies) else "rank"
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"{word} {shown} (host {', '.join(sorted({copy.host for copy in minority})[:4])}; {len(copies)} copies)"
