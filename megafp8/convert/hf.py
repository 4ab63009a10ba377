"""to_hf, from_hf: a checkpoint as a Hugging Face folder that transformers opens with nothing of ours, and back."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megafp8 import __version__
from megafp8.checkpoint import find, save
from megafp8.checkpoint.folders import candidates
from megafp8.checkpoint.manifest import MANIFEST_NAME
from megafp8.convert.hf_files import read_config, read_weights, write_weights
from megafp8.convert.hf_tokenizer import write_tokenizer
from megafp8.convert.verify_hf import Report, verify_folder
from megafp8.core.config import to_dict
from megafp8.core.errors import CheckpointError, ConfigError, DataError, ResourceError
from megafp8.core.jsonio import fsync_dir, read_json, resource_error, sha256_file, write_json
from megafp8.data.tokenizer import identity, load_tokenizer
from megafp8.infer.weights import DTYPES, check_weights, model_config, stored_name, tokenizer_path, weights
from megafp8.models.names import config_from_hf, from_hf_tensors, hf_config, to_hf_tensors
from megafp8.parallel.mesh import Mesh

RECORD_NAME = "megafp8_export.json"  # where the folder comes from, and what its verification found
_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def to_hf(
    source: Path | str,
    out: Path | str,
    *,
    dtype: str = "bf16",
    tokenizer: str | Path | None = None,
    verify: bool = True,
    say: Callable[[str], Any] = lambda _: None,
) -> Report | None:
    """Write the checkpoint `source` (or the newest one of a run) as the Hugging Face folder `out`.

    Everything is written beside `out`, verified there, and renamed. A folder that this very checkpoint was written to
    before is left as it is.

    Args:
        dtype: of the weights: "bf16", "fp16", "fp32"; rounded once, from the fp32 masters.
        tokenizer: where its file is, if it has moved since training.
        verify: reload with transformers and compare logits, tokenizer ids and a greedy sample.
        say: takes lines for people.

    Returns:
        what the comparison found, all within bounds; None without `verify`, or if there was nothing to do.

    Raises:
        CheckpointError: no checkpoint, damaged, or the comparison is out of bounds; `out` is not there then.
        ConfigError: the model cannot be expressed in this format, or a package is missing.
        DataError: the tokenizer is missing or another one.
        ResourceError: `out` is in use, no space, no permission.
    """
    source, out = find(source), Path(out)
    record = {
        "source": str(source.absolute()),
        "source_manifest_sha256": sha256_file(source / MANIFEST_NAME),
        "dtype": dtype,
        "megafp8": __version__,
    }
    if _is_done(out, record, verify):
        say(f"{out}: already made from {source}")
        return None
    with _Beside(out) as folder:
        report = _write(source, folder, record, dtype=dtype, tokenizer=tokenizer, verify=verify, say=say)
    say(f"{out}: written, {'verified' if verify else 'not verified'}")
    return report


def _is_done(out: Path, record: dict[str, Any], verify: bool) -> bool:
    """Whether `out` was made from the same checkpoint; refuse any other folder that holds something."""
    if not out.exists():
        return False
    if not out.is_dir():
        raise ResourceError(f"{out}: is a file; choose another path")
    if not any(out.iterdir()):
        return False
    try:
        old = read_json(out / RECORD_NAME)
    except DataError:
        old = {}
    same = all(old.get(key) == record[key] for key in ("source_manifest_sha256", "dtype"))
    if same and (old.get("verified") or not verify):
        return True
    raise ResourceError(f"{out}: holds something else already; remove it or choose another folder")


class _Beside:
    """A temporary folder beside `out` that becomes `out` if all goes well, else goes."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")

    def __enter__(self) -> Path:
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            for left in self.out.parent.glob(f".{self.out.name}.????????.tmp"):  # of a conversion that was killed
                shutil.rmtree(left, ignore_errors=True)
            self.folder.mkdir(mode=0o750)
        except OSError as error:
            raise resource_error(error, self.out) from error
        return self.folder

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for path in self.folder.iterdir():  # the libraries that write them do not agree on one
            path.chmod(0o640)
        fsync_dir(self.folder)
        if self.out.exists():  # an empty folder
            self.out.rmdir()
        os.rename(self.folder, self.out)
        fsync_dir(self.out.parent)


def _write(
    source: Path,
    folder: Path,
    record: dict[str, Any],
    *,
    dtype: str,
    tokenizer: str | Path | None,
    verify: bool,
    say: Callable[[str], Any],
) -> Report | None:
    config = model_config(source)
    if config.moe.capacity_factor:  # a rule of training; what others run, and what is verified, drops no token
        config = replace(config, moe=replace(config.moe, capacity_factor=0.0))
    theirs = hf_config(config)
    spec = tokenizer_path(source, tokenizer)
    tensors = weights(source, DTYPES[dtype])
    check_weights(config, tensors)
    _check_space(folder, tensors)
    say(f"{source}: {sum(t.numel() for t in tensors.values()):,} parameters as {dtype}")
    ids = write_tokenizer(spec, folder, max_length=config.max_sequence_length)
    # Written even where there is none: transformers' own defaults are ids of other models' vocabularies.
    special = {key: ids.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    name = _DTYPE_NAMES[dtype]
    write_json(folder / "config.json", {**theirs, **special, "dtype": name, "torch_dtype": name})
    write_json(folder / "generation_config.json", {k: v for k, v in special.items() if v is not None})
    write_weights(folder, to_hf_tensors(config, tensors))
    report = None
    if verify:
        report = verify_folder(folder, config, tensors, load_tokenizer(spec))
        for line in report.lines():
            say(line)
        if report.problems:
            raise CheckpointError(
                f"the written folder does not say what the model says: {'; '.join(report.problems)}; "
                "please report it (--no-verify writes it anyway)"
            )
    found = {} if report is None else {"comparisons": [vars(comparison) for comparison in report.logits]}
    write_json(folder / RECORD_NAME, {**record, "verified": verify, **found})
    return report


def _check_space(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    needed = sum(tensor.nbytes for tensor in tensors.values()) + (64 << 20)  # and the tokenizer's files
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(f"{folder.parent}: the folder needs {needed} bytes, {free} are free; free some space")


def from_hf(source: Path | str, out: Path | str) -> Path:
    """Write a Hugging Face folder as a megafp8 checkpoint of weights only, `<out>/step_00000000`.

    The weights become fp32 masters, which hold bf16 and fp16 values exactly: `to_hf` in the folder's own dtype gives
    back the same bits.

    Raises:
        CheckpointError: no model there, pickled or quantized weights, tensors missing, unknown or of wrong shapes.
        ConfigError: a model type that no family serves.
        ResourceError: `out` holds checkpoints already, no space, no permission.
    """
    source, out = Path(source), Path(out)
    if candidates(out):
        raise ResourceError(f"{out}: holds checkpoints already; choose another folder")
    config = config_from_hf(read_config(source))
    tensors = {name: t.float() for name, t in from_hf_tensors(config, read_weights(source)).items()}
    check_weights(config, tensors)
    meta: dict[str, Any] = {
        "step": 0,
        "consumed_samples": 0,
        "config": {"model": to_dict(config), "data": {"sequence_length": config.max_sequence_length}},
        "source": str(source.absolute()),
        "code_version": __version__,
    }
    try:
        meta["tokenizer"] = identity(load_tokenizer(source))
        meta["config"]["data"]["tokenizer"] = str(source.absolute())
    except (DataError, ConfigError):
        meta["tokenizer"] = None  # the run that starts from these weights names its own
    return save(out, 0, {stored_name(name): tensor for name, tensor in tensors.items()}, {}, Mesh.single(), meta)
