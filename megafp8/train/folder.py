"""The run folder: whether this run may go on in it, and what it keeps there. No torch: the launcher asks first."""

from __future__ import annotations

import logging
import secrets
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from megafp8.checkpoint.folders import candidates, damaged, latest, step_of
from megafp8.core.config import build, dump_toml, load_toml, to_dict
from megafp8.core.errors import ConfigError, ResourceError
from megafp8.core.jsonio import resource_error, write_atomic
from megafp8.core.log import event, get_logger
from megafp8.data.tokenizer_ranks import side_file
from megafp8.models.cost import checkpoint_bytes
from megafp8.nn.precision import PrecisionConfig
from megafp8.train.config import RunConfig
from megafp8.train.metrics import read_lines

logger = get_logger(__name__)
_ID = "id"  # a file: random digits that tell this run from any other
STOP_FILE = "STOP"  # while it is there, the run stops and does not start
TOKENIZER_FILES = {
    "tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.tiktoken",
    "tokenizer.tiktoken.json", "tokenizer.model.json",
}  # fmt: skip

# What may change between two starts of one run without making it another run: length, logging, saving, ranks.
_FREE = (
    "run.name", "run.dir", "train.steps", "train.micro_batch", "train.eval_interval", "train.eval_samples",
    "train.recompute", "train.recompute_layers", "train.recompute_modules",
    "train.compile", "train.threads", "train.timeout_seconds", "train.max_nonfinite_steps",
    "train.exit_after_seconds", "train.deterministic", "guard", "log", "checkpoint", "parallel",
    "data.valid", "data.allow_changed_corpus", "optimizer.kernel", "precision.fp8_param_gather",
)  # fmt: skip

# and with checkpoint.change_precision; its dtype is that of the weights
_FREE_PRECISION = tuple(f"precision.{field.name}" for field in fields(PrecisionConfig) if field.name != "dtype")
_FREE_PRECISION += ("optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype")

_FREE_CORPUS = ("data.train",)  # with data.allow_changed_corpus


def prepare(config: RunConfig) -> None:
    """Make the folder, refuse one of another run, write config.toml; rank 0 only, under the run's lock.

    Raises:
        ConfigError: the folder holds checkpoints of another configuration; the keys that differ are named.
        ResourceError: the folder cannot be written.
    """
    folder = config.dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ResourceError(f"{folder}: a file stands where the run folder should be; choose another run.dir") from None
    except OSError as error:
        raise resource_error(error, folder) from error
    refuse_other(config)
    refuse_small_disk(config)
    write_atomic(folder / "config.toml", dump_toml(config, comments=True).encode())
    if config.checkpoint.local_folder and not (folder / _ID).exists():
        write_atomic(folder / _ID, f"{secrets.token_hex(8)}\n".encode())


def refuse_small_disk(config: RunConfig) -> None:
    """Hold the space for checkpoints against what is free, before anything is computed that could not be saved.

    Raises:
        ResourceError: there is none for a single one. Less than retention will keep is a warning.
    """
    if is_finished(config):
        return
    optimizer, checkpoint = config.optimizer, config.checkpoint
    moments = optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype
    each = checkpoint_bytes(config.model, dtype=config.precision.dtype, moments=moments)
    if optimizer.name == "muon":  # matrices have one moment; at the least
        each = each * 2 // 3
    there = next(path for path in (config.dir, *config.dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if each > free:
        raise ResourceError(
            f"{config.dir}: a checkpoint of this run takes {each} bytes, {free} are free; free some space or choose "
            "another run.dir"
        )
    # while one is written, those that it will replace are still there
    wanted = max(1, checkpoint.keep_last + 1 - len(candidates(config.dir / "checkpoints"))) * each
    if wanted > free:
        sizes: dict[str, Any] = {"bytes": wanted, "free": free, "keep_last": checkpoint.keep_last}
        event(logger, "too little space for the checkpoints that are to be kept", level=logging.WARNING, **sizes)


def local_root(config: RunConfig) -> Path | None:
    """Where ranks keep this run's local checkpoints on their nodes; None if they do not.

    The run's id is in the path, so that a run that is begun anew in the same folder never goes on from the old one's.
    """
    if not (config.checkpoint.local_folder and config.checkpoint.local_interval):
        return None
    return Path(config.checkpoint.local_folder) / (config.dir / _ID).read_text().strip()


def refuse_other(config: RunConfig) -> None:
    """Raise ConfigError if the folder holds a run of another configuration; looks, and changes nothing.

    A run that ended before its first checkpoint has left nothing that could be gone on from: another may begin there.
    """
    if not _has_checkpoints(config.dir):
        return
    path = config.dir / "config.toml"
    changed = changes(_with_defaults(load_toml(path)), to_dict(config)) if path.exists() else {}
    way_out = "choose another run.dir or delete it"
    meant = _FREE_PRECISION if config.checkpoint.change_precision else ()
    meant += _FREE_CORPUS if config.data.allow_changed_corpus else ()
    changed = {key: values for key, values in changed.items() if not key.startswith(meant)}
    if changed and all(key.startswith(_FREE_PRECISION) for key in changed):
        way_out = "choose another run.dir, or go on in the new precision: checkpoint.change_precision = true"
    elif changed and all(key.startswith(_FREE_CORPUS) for key in changed):
        way_out = "choose another run.dir, or go on with these files: data.allow_changed_corpus = true"
    if changed:
        shown = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in list(changed.items())[:5])
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise ConfigError(f"{config.dir}: holds a run of another configuration ({shown}{more}); {way_out}")


def _has_checkpoints(folder: Path) -> bool:
    """Whether a run has left any there, damaged ones included, or may have left local ones on its nodes."""
    root = folder / "checkpoints"
    return bool(candidates(root) or damaged(root)) or (folder / _ID).exists()


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration that an older version wrote, with the defaults of keys that it did not know."""
    try:
        return to_dict(build(RunConfig, values))
    except ConfigError:  # it has keys that are gone: they are shown as a difference
        return values


def is_finished(config: RunConfig) -> bool:
    """Whether the newest complete checkpoint is of the last step, with nothing left to be done after it."""
    newest = latest(config.dir / "checkpoints")
    done = newest is not None and step_of(newest) >= config.train.steps
    return done and not evaluation_due(config, config.train.steps)


def evaluation_due(config: RunConfig, step: int) -> bool:
    """Whether an evaluation belongs after `step`, and metrics.jsonl has none: it gave way to a stop."""
    interval = config.train.eval_interval
    if not config.data.valid or not (step == config.train.steps or (interval and step % interval == 0)):
        return False
    records = read_lines(config.dir / "metrics.jsonl")
    return step > 0 and not any(r.get("kind") == "eval" and r.get("step") == step for r in records)


def keep_tokenizer(config: RunConfig) -> None:
    """Copy the tokenizer into <run>/tokenizer, so that what is served from the run needs nothing from elsewhere."""
    source = Path(config.data.tokenizer)
    if not source.exists():  # "bytes" has no file
        return
    names = (TOKENIZER_FILES & {p.name for p in source.iterdir()}) if source.is_dir() else {source.name}
    if source.suffix == ".json":  # a Hugging Face tokenizer says in files beside it which ids are control ids
        names |= {name for name in TOKENIZER_FILES if name.endswith(("_config.json", "_map.json"))}
    folder = source if source.is_dir() else source.parent
    for name in names:
        path = folder / name
        if path.is_file():
            target = f"tokenizer{path.suffix}" if path == source else name
            write_atomic(config.dir / "tokenizer" / target, path.read_bytes())
    if not source.is_dir() and source.suffix != ".json" and side_file(source).is_file():  # of a tiktoken file
        target = f"tokenizer{source.suffix}.json"
        write_atomic(config.dir / "tokenizer" / target, side_file(source).read_bytes())


def changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, without those that a run may change between two starts."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in {**old, **new}:
        name = prefix + key
        if any(name == free or name.startswith(free + ".") for free in _FREE):
            continue
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= changes(a, b, name + ".")
        elif a != b:
            found[name] = (a, b)
    return found
