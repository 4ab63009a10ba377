"""The run folder: what a run leaves, and whether this run may go on in it."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megafp8.core.config import dump_toml, load_toml, to_dict
from megafp8.core.errors import ConfigError, ResourceError
from megafp8.core.jsonio import resource_error, write_atomic, write_json
from megafp8.models.cost import flops_per_token, num_parameters
from megafp8.train.config import RunConfig
from megafp8.train.setup import Parts, code_version
from megafp8.train.telemetry import cpu_name

TOKENIZER_FILES = {"tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}

# What may change between two starts of one run without making it another run: length, logging, saving, ranks.
_FREE = (
    "run.name", "run.dir", "train.steps", "train.micro_batch", "train.eval_interval", "train.eval_samples",
    "train.recompute", "train.compile", "train.threads", "train.timeout_seconds", "train.max_nonfinite_steps",
    "train.deterministic", "log", "checkpoint", "parallel", "data.valid", "optimizer.kernel",
)  # fmt: skip


def prepare(config: RunConfig) -> None:
    """Make the folder, refuse one of another run, write config.toml; rank 0 only, under the run's lock.

    Raises:
        ConfigError: the folder holds a run of another configuration; the keys that differ are named.
        ResourceError: the folder cannot be written.
    """
    folder = config.dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ResourceError(f"{folder}: a file stands where the run folder should be; choose another run.dir") from None
    except OSError as error:
        raise resource_error(error, folder) from error
    path = folder / "config.toml"
    if path.exists():
        changed = changes(load_toml(path), to_dict(config))
        if changed:
            shown = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in list(changed.items())[:5])
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise ConfigError(
                f"{folder}: holds a run of another configuration ({shown}{more}); choose another run.dir or delete it"
            )
    write_atomic(path, dump_toml(config, comments=True).encode())


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


def write_facts(parts: Parts, peak: tuple[float, str]) -> None:
    """run.json: the code, the machine, and the constants that turn times into MFU."""
    config, model, sequence = parts.config, parts.config.model, parts.config.data.sequence_length
    write_json(
        config.dir / "run.json",
        {
            "name": config.name,
            "code_version": code_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name(parts.device) if parts.device.type == "cuda" else "cpu",
            "cpu": cpu_name(),
            "command": sys.argv,
            "mesh": {axis: parts.mesh.size(axis) for axis in ("pp", "dp", "cp", "tp", "ep")},
            "world_size": parts.mesh.world,
            "threads": torch.get_num_threads(),
            "peak_flops": peak[0],
            "peak_source": peak[1],
            "num_parameters": num_parameters(model),
            "flops_per_token_causal": flops_per_token(model, sequence, causal=True),
            "flops_per_token_full": flops_per_token(model, sequence, causal=False),
            "unigram_entropy_nats": parts.corpus["unigram_entropy_nats"],
            "train_tokens": parts.corpus["train_tokens"],
            "tokenizer": {k: parts.corpus[k] for k in ("kind", "fingerprint", "vocab_size", "path")},
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
    )


