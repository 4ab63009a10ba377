"""to_hf, from_hf: a checkpoint as a Hugging Face folder that transformers opens with nothing of ours, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megafp8 import __version__
from megafp8.checkpoint.folders import candidates
from megafp8.convert.by_layer import Folder
from megafp8.convert.checkpoint_out import write_checkpoint
from megafp8.convert.folder import RECORD_NAME, Beside, is_done
from megafp8.convert.hf_files import shard_names, write_index
from megafp8.convert.hf_tokenizer import write_tokenizer
from megafp8.convert.memory import check_memory
from megafp8.convert.source import HuggingFaceFolder, Source, open_source
from megafp8.convert.stream import Group, Made, Output, write_groups
from megafp8.convert.verify_hf import Report, verify_folder
from megafp8.core.config import to_dict
from megafp8.core.errors import CheckpointError, ConfigError, DataError, ResourceError
from megafp8.core.jsonio import write_json
from megafp8.data.tokenizer import identity, load_tokenizer
from megafp8.infer.weights import DTYPES, stored_name
from megafp8.models import ModelConfig
from megafp8.models.families.rules import Rule
from megafp8.models.names import VIEWS, hf_config, resolved_rules, split

_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def to_hf(
    source: Path | str,
    out: Path | str,
    *,
    dtype: str = "bf16",
    tokenizer: str | Path | None = None,
    verify: bool = True,
    workers: int = 0,
    say: Callable[[str], Any] = lambda _: None,
) -> Report | None:
    """Write the checkpoint `source` (or the newest one of a run) as the Hugging Face folder `out`.

    Everything is written beside `out`, verified there, and renamed. A folder that this very checkpoint was written to
    before is left as it is; an interrupted run goes on where it was.

    Args:
        dtype: of the weights: "bf16", "fp16", "fp32"; rounded once, from the fp32 masters.
        tokenizer: where its file is, if it has moved since training.
        verify: run it through transformers and compare logits and tokenizer ids.
        workers: threads that read, round and write; 0: as many as there are cores, at most 8.
        say: takes lines for people.

    Returns:
        what the comparison found, all within bounds; None without `verify`, or if there was nothing to do.

    Raises:
        CheckpointError: no checkpoint, damaged, or the comparison is out of bounds; `out` is not there then.
        ConfigError: the model cannot be expressed in this format, or a package is missing.
        DataError: the tokenizer is missing or another one.
        ResourceError: `out` is in use, no space, no permission.
    """
    out = Path(out)
    with open_source(source) as model:
        record = {
            "source": str(model.path.absolute()),
            "source_fingerprint": model.fingerprint,
            "dtype": dtype,
            "megafp8": __version__,
        }
        if is_done(out, record, ("source_fingerprint", "dtype"), verify=verify):
            say(f"{out}: already made from {model.path}")
            return None
        theirs, spec = hf_config(model.config), model.tokenizer(tokenizer)
        if verify:
            check_memory(model.config, say)
        with Beside(out) as folder:
            say(f"{model.path}: {sum(map(_numel, model.shapes.values())):,} parameters as {dtype}")
            written = write_groups(folder, model, hf_groups(model, DTYPES[dtype]), workers=workers, say=say)
            write_index(folder, written.files)
            write_sidecars(folder, model, theirs, spec, dtype)
            report = _verified(folder, model, spec, DTYPES[dtype], say) if verify else None
            found = {} if report is None else {"comparisons": [vars(comparison) for comparison in report.logits]}
            write_json(folder / RECORD_NAME, {**record, "verified": verify, **found})
    say(f"{out}: written, {'verified' if verify else 'not verified'}")
    return report


def hf_groups(source: Source, dtype: torch.dtype) -> list[Group]:
    """The weights of a Hugging Face folder: one group for each of our tensors, in shards."""
    rules = list(resolved_rules(source.config))
    planned = [_planned(source, rule, dtype) for rule in rules]
    files = shard_names([sum(output.bytes for output in outputs) for outputs in planned])
    return [
        Group(
            rule.ours,
            (rule.ours,),
            tuple(Output(file, output.name, output.dtype, output.shape) for output in outputs),
            _maker(source.config, rule, dtype),
            source.written_dtype(rule.ours, dtype),
            memory=0 if rule.kind in VIEWS else None,
        )
        for rule, outputs, file in zip(rules, planned, files, strict=True)
    ]


def _planned(source: Source, rule: Rule, dtype: torch.dtype) -> list[Output]:
    parts = split(source.config, rule, torch.empty(source.shapes[rule.ours], device="meta"))
    stored = source.written_dtype(rule.ours, dtype)
    return [Output("", name, stored, tuple(part.shape)) for name, part in zip(rule.theirs, parts, strict=True)]


def _maker(config: ModelConfig, rule: Rule, dtype: torch.dtype) -> Callable[..., Made]:
    def make(tensors: list[torch.Tensor]) -> Made:
        (tensor,) = tensors
        if dtype == torch.float16 and not torch.isfinite(tensor).all():
            raise CheckpointError(f"{rule.ours} holds values that fp16 cannot (above 65504, or none): use --dtype bf16")
        return Made(split(config, rule, tensor))

    return make


def write_sidecars(folder: Path, source: Source, theirs: dict[str, Any], spec: str, dtype: str) -> None:
    """Write config.json (`theirs` with ids and dtype), generation_config.json and the tokenizer's files.

    Raises:
        ConfigError: a tokenizer that tokenizer.json cannot express.
        ResourceError: no space, no permission.
    """
    ids = write_tokenizer(spec, folder, max_length=source.config.max_sequence_length, add_bos=source.add_bos)
    # Written even where there is none: transformers' own defaults are ids of other models' vocabularies.
    special = {key: ids.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    name = _DTYPE_NAMES[dtype]
    write_json(folder / "config.json", {**theirs, **special, "dtype": name, "torch_dtype": name})
    write_json(folder / "generation_config.json", {k: v for k, v in special.items() if v is not None})


def _verified(folder: Path, model: Source, spec: str, dtype: torch.dtype, say: Callable[[str], Any]) -> Report:
    def read(name: str) -> torch.Tensor:
        return model.read(name, model.written_dtype(name, dtype))

    report = verify_folder(folder, model.config, read, dtype, load_tokenizer(spec))
    for line in report.lines():
        say(line)
    if report.problems:
        raise CheckpointError(
            f"the written folder does not say what the model says: {'; '.join(report.problems)}; "
            "please report it (--no-verify writes it anyway)"
        )
    return report


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def from_hf(
    source: Path | str,
    out: Path | str,
    *,
    verify: bool = True,
    workers: int = 0,
    say: Callable[[str], Any] = lambda _: None,
) -> Path:
    """Write a Hugging Face folder as a megafp8 checkpoint of weights only, `<out>/step_00000000`.

    The weights become fp32 masters, which hold bf16 and fp16 values exactly: `to_hf` in the folder's own dtype gives
    back the same bits. An interrupted run goes on where it was.

    Args:
        verify: compare the logits of what was written with those of transformers on the folder itself.
        workers: as of `to_hf`.
        say: takes lines for people.

    Raises:
        CheckpointError: no model there, pickled or quantized weights, tensors missing, unknown or of wrong shapes; or
            the comparison is out of bounds, and nothing is there then.
        ConfigError: a model type that no family serves, or transformers is not installed.
        ResourceError: `out` holds checkpoints already, no space, no permission.
    """
    source, out = Path(source), Path(out)
    if candidates(out):
        raise ResourceError(f"{out}: holds checkpoints already; choose another folder")
    with HuggingFaceFolder(source) as model:
        if verify:
            check_memory(model.config, say)
        meta: dict[str, Any] = {
            "step": 0,
            "consumed_samples": 0,
            "config": {"model": to_dict(model.config), "data": {"sequence_length": model.config.max_sequence_length}},
            "source": str(source.absolute()),
            "fp32_weights": sorted(model.fp32),
            "code_version": __version__,
        }
        try:
            meta["tokenizer"] = identity(load_tokenizer(source))
            meta["config"]["data"]["tokenizer"] = str(source.absolute())
        except (DataError, ConfigError):
            meta["tokenizer"] = None  # the run that starts from these weights names its own
        check = partial(_verify_import, model, say=say) if verify else None
        return write_checkpoint(model, out, meta, check=check, workers=workers, say=say)


def _verify_import(source: Source, folder: Path, *, say: Callable[[str], Any]) -> None:
    """Run what is in the files of `folder` against transformers on the folder that it was made from.

    Without the tokenizer: which one goes with the model is settled when something is trained or exported.
    """
    dtype = next(iter(source.dtypes.values()))
    with Folder(folder) as stored:
        report = verify_folder(
            source.path, source.config, lambda n: stored[stored_name(n)].to(source.dtypes[n]), dtype, None
        )
    for comparison in report.logits:
        say(str(comparison))
    if report.problems:
        raise CheckpointError(
            f"what was read from {source.path} does not say what transformers reads there: "
            f"{'; '.join(report.problems)}; please report it (--no-verify writes it anyway)"
        )
