"""A run's state to and from a checkpoint: which tensors, which labels, which numbers beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch

from megafp8.checkpoint import latest, load, load_newest, read_meta, save
from megafp8.checkpoint.folders import step_of
from megafp8.checkpoint.local import forget_local, load_newest_local
from megafp8.checkpoint.manifest import MismatchError
from megafp8.checkpoint.ranks import agree
from megafp8.core.config import to_dict
from megafp8.core.errors import CheckpointError, DataError
from megafp8.core.layout import Layout
from megafp8.core.log import event, get_logger
from megafp8.data.marks import Marks
from megafp8.parallel.collectives import merge_dicts
from megafp8.parallel.mesh import Mesh
from megafp8.train.folder import local_root
from megafp8.train.fp8_state import PREFIX, WARMUP, asked_as_stored, mend_scales, restore
from megafp8.train.setup import Parts, code_version

logger = get_logger(__name__)
Taken = TypeVar("Taken")
_MOMENTS = "optimizer.exp_avg"  # what names of both of Adam's moments start with


def tensors_of(parts: Parts) -> tuple[dict[str, torch.Tensor], dict[str, Layout]]:
    """Live tensors of optimizer, FP8 state and experts' balance by global name, and their layouts.

    The compute-dtype weights are not among them: they are a rounding of the masters.
    """
    tensors, layouts = dict(parts.optimizer.tensors()), dict(parts.optimizer.layouts())
    for module, state in parts.fp8_states.items():
        for name, tensor in state.tensors().items():
            tensors[f"{PREFIX}{module}.{name}"] = tensor
            layouts[f"{PREFIX}{module}.{name}"] = Layout(tuple(tensor.shape))
    for module, router in parts.routers.items():
        if router.bias is not None:
            tensors[f"moe.{module}.bias"] = router.bias
            layouts[f"moe.{module}.bias"] = Layout(tuple(router.bias.shape))
    return tensors, layouts


Take = Callable[[int, Mapping[str, torch.Tensor], Mapping[str, Layout], dict[str, Any]], Taken]


def save_run(parts: Parts, step: int, progress: dict[str, Any]) -> Path:
    """Write <run>/checkpoints/step_<step>; collective. `progress` goes into the manifest beside the config."""
    root, threads = parts.config.dir / "checkpoints", parts.config.checkpoint.write_threads
    return with_state(
        parts, step, progress, lambda s, t, layouts, meta: save(root, s, t, layouts, parts.mesh, meta, threads=threads)
    )


def with_state(parts: Parts, step: int, progress: dict[str, Any], take: Take[Taken]) -> Taken:
    """What `take` makes of this rank's tensors, their layouts and the meta of a checkpoint at `step`."""
    parts.optimizer.wait()  # no weights are on their way while ranks write, nor when a run ends after this
    tensors, layouts = tensors_of(parts)
    meta = {
        "step": step,
        "consumed_samples": parts.loader.consumed_samples,
        "optimizer_steps": parts.optimizer.step_count,
        "config": to_dict(parts.config),
        "tokenizer": {key: value for key, value in parts.corpus.items() if key != "datasets"},
        "datasets": parts.corpus.get("datasets", []),
        "code_version": code_version(),
        WARMUP: parts.warmup_until,
        **progress,
    }
    try:
        return take(step, tensors, layouts, meta)
    finally:
        parts.optimizer.drop_copies()


def _compare_moments(parts: Parts, meta: Mapping[str, Any]) -> None:
    """Moments may be kept in another dtype than they were saved from, said aloud."""
    before, now = meta["config"]["optimizer"], to_dict(parts.config)["optimizer"]
    keys = ("exp_avg_dtype", "exp_avg_sq_dtype")
    changed: dict[str, Any] = {
        key: f"{before.get(key, 'fp32')} -> {now[key]}" for key in keys if before.get(key, "fp32") != now[key]
    }
    if changed:
        event(logger, "optimizer moments are converted", level=logging.WARNING, **changed)


def _with_sizes(error: MismatchError, path: Path | None, parts: Parts) -> MismatchError:
    """`error` with the keys of [model] that differ ahead of the tensors that follow from them."""
    if path is None:
        return error
    there, here = read_meta(path)["config"]["model"], to_dict(parts.config.model)
    keys = [f"model.{key} is {here.get(key)!r} here, {there.get(key)!r} there" for key in {**there, **here}
            if there.get(key) != here.get(key)]  # fmt: skip
    return MismatchError(f"{path}: {'; '.join([*keys, str(error)])}")


def refuse_nonfinite(tensors: Mapping[str, torch.Tensor], mesh: Mesh, path: Path) -> None:
    """Raise CheckpointError, on every rank alike, if a loaded tensor is not finite somewhere; collective."""
    mine = {n: True for n, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())}
    names = sorted(merge_dicts(mine, mesh.group_of(("pp", "dp", "cp", "tp"))))
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(
            f"{path}: holds values that are not finite in {', '.join(names[:3])}{more}; it was saved from a run that "
            "had broken, remove it and go on from an older one"
        )


def _compare_corpus(parts: Parts, meta: Mapping[str, Any], path: Path) -> None:
    """Raise DataError if the training files are not those of the checkpoint, unless that is meant; then say it."""
    before, now = meta.get("datasets") or [], parts.corpus.get("datasets") or []
    shown = [f"{_short(a)} was {_short(b)}" for a, b in zip_longest(now, before)
             if (a or {}).get("fingerprint") != (b or {}).get("fingerprint")]  # fmt: skip
    if not before or not shown:
        return
    if not parts.config.data.allow_changed_corpus:
        raise DataError(
            f"the training files are not those that {path} was trained on: {'; '.join(shown)}; put the old ones back, "
            "or go on with these, whose samples have other numbers: data.allow_changed_corpus = true"
        )
    event(logger, "the corpus is not the checkpoint's", level=logging.WARNING, changed="; ".join(shown))


def _short(dataset: Mapping[str, Any] | None) -> str:
    if dataset is None:
        return "nothing"
    return f"{dataset['path']} ({dataset['tokens']:,} tokens, {str(dataset['fingerprint']).rpartition(':')[2][:12]})"


def load_newest_run(parts: Parts) -> tuple[Path, dict[str, Any]] | None:
    """Fill this run from its newest intact checkpoint, of any mesh; collective.

    Returns:
        its folder and its meta; None if the run has none yet.

    Raises:
        CheckpointError: none is intact, or the newest is of another architecture or tokenizer, or lacks FP8 state that
            its own configuration asks for.
    """
    root = parts.config.dir / "checkpoints"
    newest = latest(root)
    step = int(agree([-1.0 if newest is None else float(step_of(newest))], parts.mesh)[0])
    found = _load_local(parts, newer_than=step)
    if found is None:
        try:
            found = _load_state(parts, newest, partial(load_newest, root))
        except MismatchError:
            raise
        except CheckpointError:  # none is intact
            found = _load_local(parts, newer_than=-1)
            if found is None:
                raise
        if found is not None and found[1]["step"] < step:  # the newest was damaged inside: a local one may be newer
            found = _load_local(parts, newer_than=found[1]["step"]) or found
    if (local := local_root(parts.config)) is not None:
        forget_local(local, parts.mesh, above=found[1]["step"] if found is not None else -1)
    return found


def _load_local(parts: Parts, *, newer_than: int) -> tuple[Path, dict[str, Any]] | None:
    root = local_root(parts.config)
    if root is None:
        return None

    def read(*args: Any, **options: Any) -> tuple[Path, dict[str, Any]] | None:  # nothing may differ in what is local
        return load_newest_local(root, *args, newer_than=newer_than)

    return _load_state(parts, None, read)


def load_run(parts: Parts, path: Path) -> tuple[Path, dict[str, Any]]:
    """Fill this run from the checkpoint `path`, of any run and mesh, all of it; collective.

    Raises:
        CheckpointError, DataError: as `load_newest_run`; missing or damaged, too.
    """
    found = _load_state(parts, path, lambda *args, **options: (path, load(path, *args, **options)))
    assert found is not None
    return found


def _load_state(parts: Parts, newest: Path | None, read: Callable[..., Any]) -> tuple[Path, dict[str, Any]] | None:
    """What `read` finds, all of it into the run; `newest`: what that will probably be."""
    tensors, layouts = tensors_of(parts)
    asked = asked_as_stored(tensors, newest)
    layouts |= {name: Layout(tuple(t.shape)) for name, t in asked.items() if t is not tensors[name]}
    try:
        found = read(asked, layouts, parts.mesh, optional=PREFIX, converted=_MOMENTS)
    except MismatchError as error:
        raise _with_sizes(error, newest, parts) from error
    if found is None:
        return None
    path, meta = found
    mend_scales(parts, asked)
    refuse_nonfinite(asked, parts.mesh, path)
    restore(parts, path, meta, asked)
    _compare_moments(parts, meta)
    if meta["tokenizer"]["fingerprint"] != parts.corpus["fingerprint"]:
        raise CheckpointError(
            f"{path}: trained with tokenizer {meta['tokenizer']['fingerprint'][:12]}, the data has "
            f"{parts.corpus['fingerprint'][:12]}; use the corpus of that tokenizer or another run.dir"
        )
    wrote, has = Marks.of(meta["tokenizer"]), Marks.of(parts.corpus)
    if wrote != has:
        raise CheckpointError(
            f"{path}: trained on documents written as {wrote}, those of the data are {has}; make the corpus again with "
            "the tokenizer.add_bos and append_eos of the first, or use another run.dir"
        )
    _compare_corpus(parts, meta, path)
    parts.optimizer.step_count = meta["optimizer_steps"]
    parts.optimizer.load_done()
    parts.loader.consumed_samples = meta["consumed_samples"]
    for state in parts.fp8_states.values():
        state.drop_weight_cache()
    return path, meta
