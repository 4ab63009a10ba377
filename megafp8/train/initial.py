"""What a new run begins from in place of random weights: another checkpoint, all of it or parts, or a foreign folder.

Read once: a run that has a checkpoint of its own goes on from that. `load_check.refuse_unfit` has judged it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import torch

from megafp8.checkpoint import find, load, read_meta
from megafp8.core.config import nearest
from megafp8.core.errors import CheckpointError, ConfigError, DataError
from megafp8.core.log import event, get_logger
from megafp8.data.tokenizer import Tokenizer, load_tokenizer
from megafp8.infer.weights import BALANCE, MASTER
from megafp8.models.config import ModelConfig
from megafp8.parallel.collectives import merge_dicts
from megafp8.train.load_check import is_foreign
from megafp8.train.setup import Parts
from megafp8.train.state import load_run, refuse_nonfinite, tensors_of

logger = get_logger(__name__)

_VOCABULARY = ("embedding.weight", "output.weight")
_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs, doesn't it?  Two spaces, a\ttab\nand a line.",
    "Größere Wörterbücher enthalten Straßenbahnhaltestellen; Ärger über Öl kostet 12,50 €.",
    "日本語の文章には空白がありません。「形態素」が必要です。",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2.5e-3]}\n",
    "naïve café 👩\u200d🔬 Ελληνικά Русский العربية हिन्दी \u0000",
)


class Foreign(Protocol):
    """A model that is no checkpoint of ours, by our names, one tensor at a time."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor: ...


OpenForeign = Callable[[Path], AbstractContextManager[Foreign]]


def begin_from(parts: Parts, open_foreign: OpenForeign | None = None) -> tuple[Path, dict[str, Any]] | None:
    """Fill a run that has no checkpoint of its own as `checkpoint.load_from` says; collective.

    Returns:
        the checkpoint's path and meta if the run goes on from its step (load_what "run"); None if it begins at step 0.

    Raises:
        CheckpointError: missing, damaged, of another model or tokenizer; every difference is listed.
        ConfigError: a pattern that no parameter matches.
    """
    asked = parts.config.checkpoint
    if not asked.load_from:
        return None
    path = Path(asked.load_from)
    chosen = _chosen(parts, asked.load_only)
    if is_foreign(path):
        assert open_foreign is not None, "who starts a run says how foreign folders are read"
        theirs = _foreign_tokenizer(path)
        same = theirs is not None and parts.tokenizer is not None and same_ids(parts.tokenizer, theirs)
        said = parts.corpus.get("fingerprint") if same else theirs.fingerprint if theirs else None
        _compare_tokenizer(parts, said, path, chosen)
        count = _take_foreign(parts, path, open_foreign, chosen)
    else:
        path = find(path)
        meta = read_meta(path)
        _compare_tokenizer(parts, (meta.get("tokenizer") or {}).get("fingerprint"), path, chosen)
        if asked.load_what == "run":
            event(logger, "begun as another run stood", checkpoint=str(path), step=meta["step"])
            return load_run(parts, path)
        count = _take_ours(parts, path, chosen)
        if asked.load_what == "optimizer":
            parts.optimizer.step_count = meta["optimizer_steps"]
    parts.optimizer.load_done()
    for state in parts.fp8_states.values():
        state.drop_weight_cache()
    event(logger, "begun from weights", source=str(path), what=asked.load_what, tensors=count)
    return None


def parameter_of(name: str) -> str:
    """The parameter that a tensor of a checkpoint belongs to, by its global name; empty for FP8 state."""
    if name.startswith(BALANCE):
        return name.removeprefix(BALANCE)
    return name.split(".", 2)[2] if name.startswith("optimizer.") else ""


def _chosen(parts: Parts, patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a parameter is to be taken. Every pattern must match one of this run's, of all ranks together."""
    if not patterns:
        return bool
    mine = {parameter_of(name): True for name in tensors_of(parts)[0]}
    names = sorted(name for name in merge_dicts(mine, parts.mesh.group_of(("pp", "dp", "cp", "tp"))) if name)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            places = {".".join(name.split(".")[:count]) for name in names for count in range(1, 9)}
            near = nearest(pattern.rstrip("*").rstrip("."), places)
            raise ConfigError(f"checkpoint.load_only = {pattern!r}: matches no parameter{near}")
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def _take_ours(parts: Parts, path: Path, chosen: Callable[[str], bool]) -> int:
    kinds = (MASTER, BALANCE) if parts.config.checkpoint.load_what == "weights" else ("optimizer.", BALANCE)

    def wanted(name: str) -> bool:
        return name.startswith(kinds) and chosen(parameter_of(name))

    tensors, layouts = tensors_of(parts)
    asked = {name: tensor for name, tensor in tensors.items() if wanted(name)}
    load(path, asked, layouts, parts.mesh, among=wanted, converted="optimizer.")
    refuse_nonfinite(asked, parts.mesh, path)
    return len(asked)


def _take_foreign(parts: Parts, path: Path, open_foreign: OpenForeign, chosen: Callable[[str], bool]) -> int:
    """Each rank reads the tensors that it holds a part of, one at a time, and keeps its part."""
    tensors, layouts = tensors_of(parts)
    count = 0
    with open_foreign(path) as source:
        for name, target in tensors.items():
            ours = parameter_of(name)
            if not name.startswith((MASTER, BALANCE)) or not chosen(ours) or not target.numel():
                continue
            layout = layouts[name]
            if tuple(source.shapes.get(ours, ())) != layout.shape:
                found = source.shapes.get(ours)
                said = f"has shape {tuple(found)}, not {layout.shape}" if found is not None else "is not there"
                raise CheckpointError(f"{path}: {ours} {said}; take other parts: checkpoint.load_only")
            target.copy_(source.read(ours)[layout.local_slices(parts.mesh)])
            count += 1
    refuse_nonfinite({n: t for n, t in tensors.items() if n.startswith(MASTER)}, parts.mesh, path)
    return count


def _foreign_tokenizer(path: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(str(path))
    except DataError:
        return None


def same_ids(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether two tokenizers, of files that differ, give the same ids: one may be a translation of the other.

    Judged by texts of several scripts, and by what up to 4,096 ids of all over the vocabulary decode to.
    """
    if a.eod_id != b.eod_id or any(a.encode(text) != b.encode(text) for text in _TEXTS):
        return False
    size = min(a.vocab_size, b.vocab_size)
    return all(a.decode([i]) == b.decode([i]) for i in range(0, size, max(1, size // 4096)))


def _compare_tokenizer(parts: Parts, there: str | None, path: Path, chosen: Callable[[str], bool]) -> None:
    """Ids must mean the same where what is indexed by them is taken."""
    here = parts.corpus.get("fingerprint")
    if there == here or not any(chosen(name) for name in _VOCABULARY):
        return
    if there is None:
        event(logger, "its tokenizer is unknown; ids must mean the same", level=logging.WARNING, source=str(path))
        return
    changed = f"its tokenizer is {there[:12]}, the data has {str(here)[:12]}"
    if not parts.config.checkpoint.change_model:
        raise CheckpointError(
            f"{path}: {changed}; use a corpus of that tokenizer, leave {' and '.join(_VOCABULARY)} out "
            "(checkpoint.load_only), or say that it is meant: checkpoint.change_model = true"
        )
    event(logger, "the tokenizer is not the checkpoint's", level=logging.WARNING, changed=changed)
