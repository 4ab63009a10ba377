"""Hugging Face folders of quantized weights: ModelOpt's layout and compressed-tensors'.

Names, shapes and both configuration files as nvidia-modelopt 0.47 and compressed-tensors 0.20 write them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megafp8 import __version__
from megafp8.convert.folder import RECORD_NAME, Beside, is_done
from megafp8.convert.fp8_verify import verify_quantized
from megafp8.convert.fp8_weights import E4M3_MAX, Scheme, lines_of, parts, quantize_fused, refusal
from megafp8.convert.hf import write_sidecars
from megafp8.convert.hf_files import shard_names, write_index
from megafp8.convert.memory import check_memory
from megafp8.convert.scales import Amaxes, Calibration, find_amaxes, linears_of
from megafp8.convert.source import Source, open_source, unrounded
from megafp8.convert.stream import Group, Made, Output, write_groups
from megafp8.core.errors import ConfigError
from megafp8.core.jsonio import read_json, write_json
from megafp8.models import ModelConfig
from megafp8.models.families.rules import Rule
from megafp8.models.names import VIEWS, hf_config, resolved_rules, split

SCHEMES: dict[str, tuple[Scheme, ...]] = {
    "modelopt": ("fp8", "fp8-block", "nvfp4"),
    "compressed-tensors": ("fp8-channel",),
}
_ALGORITHMS = {"fp8": "FP8", "fp8-block": "FP8_PB_WO", "nvfp4": "NVFP4"}
_MODELOPT = {"name": "modelopt", "version": "0.47.0"}  # whose layout it is; readers go by the name


@dataclass(frozen=True)
class Options:
    """What is written.

    Attributes:
        layout: "modelopt" or "compressed-tensors".
        scheme: how weights are quantized: see `SCHEMES`; "" takes the layout's first.
        kv_cache: store scales of an FP8 cache of keys and values (ModelOpt only).
        calibration: None takes the run's own amax history.
        dtype: of what is not quantized.
    """

    layout: str
    scheme: Scheme | str = ""
    kv_cache: bool = False
    calibration: Calibration | None = None
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        known = SCHEMES[self.layout]
        if not self.scheme:
            object.__setattr__(self, "scheme", known[0])
        if self.scheme not in known:
            raise ConfigError(f"--quant {self.scheme}: {self.layout} folders have {', '.join(known)}")
        if self.dtype not in ("bf16", "fp16"):
            raise ConfigError(f"--dtype {self.dtype}: readers of quantized folders compute in bf16 or fp16")
        if self.kv_cache and self.layout != "modelopt":
            raise ConfigError(f"--kv-cache fp8: its scales belong to ModelOpt's layout, not to {self.layout}")

    @property
    def needs_inputs(self) -> bool:
        """Whether static scales of activations, keys or values are stored."""
        return self.scheme in ("fp8", "nvfp4") or self.kv_cache


def to_quantized(
    source: Path | str,
    out: Path | str,
    options: Options,
    *,
    tokenizer: str | None = None,
    verify: bool = True,
    workers: int = 0,
    say: Callable[[str], Any] = lambda _: None,
) -> None:
    """Write a checkpoint as a quantized Hugging Face folder; see `hf.to_hf` for what holds of all conversions.

    Raises:
        CheckpointError: no checkpoint, damaged, or the comparison is out of bounds; `out` is not there then.
        ConfigError: the model cannot be expressed so, or there is nothing that scales could come from.
        DataError: the tokenizer or the calibration text is missing or another one.
        ResourceError: `out` is in use, no space, no permission.
    """
    out = Path(out)
    with open_source(source) as model:
        record: dict[str, Any] = {
            "source": str(model.path.absolute()),
            "source_fingerprint": model.fingerprint,
            "layout": options.layout,
            "scheme": options.scheme,
            "kv_cache": options.kv_cache,
            "calibration": vars(options.calibration) if options.calibration else None,
            "dtype": options.dtype,
            "megafp8": __version__,
        }
        keys = ("source_fingerprint", "layout", "scheme", "kv_cache", "calibration", "dtype")
        if is_done(out, record, keys, verify=verify):
            say(f"{out}: already made from {model.path}")
            return
        theirs, spec = hf_config(model.config), model.tokenizer(tokenizer)
        _refuse(model.config, options)
        if verify:
            check_memory(model.config, say)
        amaxes = Amaxes("none needed", {})
        if options.needs_inputs:
            amaxes = find_amaxes(model, options.calibration, tokenizer=tokenizer, kv=options.kv_cache, say=say)
            say(f"activation scales: {amaxes.origin}")
        plan = _Plan(model, options, amaxes)
        with Beside(out) as folder:
            made = {"amaxes": [amaxes.inputs, amaxes.keys, amaxes.values, amaxes.kept], "scheme": options.scheme}
            written = write_groups(folder, model, plan.groups(), options=made, workers=workers, say=say)
            write_index(folder, written.files)
            write_sidecars(folder, model, theirs, spec, options.dtype)
            _write_quantization(folder, options, plan.excluded())
            notes = [written.notes[rule.ours] for rule in plan.rules if rule.ours in plan.linears]
            linears = {name: note for found in notes for name, note in found.items()}
            for line in lines_of(linears, plan.kept):
                say(line)
            found = verify_quantized(folder, model, spec, say) if verify else {}
            record |= {"verified": verify, "activations": amaxes.origin, "linears": linears, "kept": plan.kept, **found}
            write_json(folder / RECORD_NAME, record)
    say(f"{out}: written, {'verified' if verify else 'not verified'}")


def _refuse(config: ModelConfig, options: Options) -> None:
    """Raise ConfigError for models that the layout cannot hold."""
    if options.kv_cache and config.mla.enabled:
        raise ConfigError("--kv-cache fp8: latent attention keeps latents, for which the layout has no scales")
    if options.layout == "compressed-tensors" and config.family == "gpt":
        raise ConfigError(
            "--to compressed-tensors: it quantizes linears, and GPT-2's class has none in its layers (Conv1D), so that "
            "no reader takes it; nearest: --to modelopt"
        )


class _Plan:
    """Which tensors of the model are quantized, and what that writes."""

    def __init__(self, source: Source, options: Options, amaxes: Amaxes) -> None:
        self.source, self.options, self.amaxes = source, options, amaxes
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
        self.rules = list(resolved_rules(source.config))
        self.kept: dict[str, str] = dict(amaxes.kept)
        self.linears: dict[str, str] = {}  # our tensor -> its linear, of those that are quantized
        weights = linears_of(source.config, [rule.ours for rule in self.rules])
        for rule in self.rules:
            linear = weights.get(rule.ours)
            if linear is None or linear in self.kept:
                continue
            reason = next(
                (why for rows, columns in self._shapes(rule) if (why := refusal(self._scheme, rows, columns))), None
            )
            if reason:
                self.kept[linear] = reason
            else:
                self.linears[rule.ours] = linear

    @property
    def _scheme(self) -> Scheme:
        return self.options.scheme  # type: ignore[return-value]

    def excluded(self) -> list[str]:
        """Foreign names of the modules whose weights are matrices and not quantized."""
        names = ["lm_head"]
        for rule in self.rules:
            if rule.ours not in self.linears and len(self.source.shapes[rule.ours]) > 1:
                names += [name.removesuffix(".weight") for name in rule.theirs]
        return list(dict.fromkeys(names))

    def groups(self) -> list[Group]:
        """One for each of our tensors, in shards."""
        planned = [self._outputs(rule) for rule in self.rules]
        files = shard_names([sum(output.bytes for output in outputs) for outputs in planned])
        return [
            Group(
                rule.ours,
                (rule.ours, *self._beside(rule)),
                tuple(Output(file, output.name, output.dtype, output.shape) for output in outputs),
                self._quantizer(rule) if rule.ours in self.linears else self._copier(rule),
                torch.float32 if rule.ours in self.linears else self.dtype,
                memory=self._memory(rule, outputs),
            )
            for rule, outputs, file in zip(self.rules, planned, files, strict=True)
        ]

    def _beside(self, rule: Rule) -> list[str]:
        """Another tensor of ours that readers fuse with this one: the two down-projections of latent attention."""
        pair = ("q_down", "kv_down")
        _, _, end = rule.ours.partition(".attention.")
        names = [rule.ours.replace(end, f"{x}.weight") for x in pair if end.partition(".")[0] in pair]
        return [name for name in names if name != rule.ours] if all(name in self.linears for name in names) else []

    def _memory(self, rule: Rule, outputs: list[Output]) -> int:
        """Beside what is read: the codes, and copies of q, k and v, which lie by groups."""
        copies = rule.ours in self.linears and rule.kind not in VIEWS
        return sum(o.bytes for o in outputs) + copies * self.source.memory(rule.ours, torch.float32)

    def _matrices(self, rule: Rule, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The foreign weights of a rule as [out, in], also where the foreign class keeps [in, out]."""
        found = split(self.source.config, rule, tensor)
        return [matrix.T for matrix in found] if rule.kind.startswith("conv1d") else found

    def _shapes(self, rule: Rule) -> list[tuple[int, int]]:
        whole = torch.empty(self.source.shapes[rule.ours], device="meta")
        return [(matrix.shape[0], matrix.shape[1]) for matrix in self._matrices(rule, whole)]

    def _outputs(self, rule: Rule) -> list[Output]:
        if rule.ours not in self.linears:
            whole = torch.empty(self.source.shapes[rule.ours], device="meta")
            stored = torch.float32 if unrounded(rule.ours) else self.dtype
            found = split(self.source.config, rule, whole)
            return [Output("", n, stored, tuple(part.shape)) for n, part in zip(rule.theirs, found, strict=True)]
        outputs = []
        for name, (rows, columns) in zip(rule.theirs, self._shapes(rule), strict=True):
            stem = name.removesuffix("weight")
            outputs += [Output("", stem + p.ending, p.dtype, p.shape) for p in parts(self._scheme, rows, columns)]
        return outputs + [Output("", name, torch.float32, ()) for name in self._kv_names(rule)]

    def _kv_names(self, rule: Rule) -> list[str]:
        """Names of the scales of keys and values that lie with this rule's tensor."""
        if not self.options.kv_cache or not rule.ours.endswith(".attention.qkv.weight"):
            return []
        stem = rule.theirs[0].rpartition(".weight")[0].rpartition(".")[0]
        return [f"{stem}.k_proj.k_scale", f"{stem}.v_proj.v_scale"]

    def _copier(self, rule: Rule) -> Callable[[Sequence[torch.Tensor]], Made]:
        return lambda tensors: Made(split(self.source.config, rule, tensors[0]))

    def _quantizer(self, rule: Rule) -> Callable[[Sequence[torch.Tensor]], Made]:
        linear, beside = self.linears[rule.ours], [self.linears[name] for name in self._beside(rule)]
        amaxes = [self.amaxes.inputs[name] for name in (linear, *beside) if name in self.amaxes.inputs]
        amax = max(amaxes, default=None)

        def make(tensors: Sequence[torch.Tensor]) -> Made:
            matrices = self._matrices(rule, tensors[0])
            notes, stored = {}, []
            for number, fused in enumerate(_fused(rule, matrices)):
                tensors_of, note = quantize_fused(self._scheme, fused, amax, beside=tensors[1:])
                stored += tensors_of
                notes[linear if len(fused) == len(matrices) else f"{linear}[{number}]"] = note
            attention = linear.rpartition(".")[0]
            if self._kv_names(rule):
                pair = self.amaxes.keys[attention], self.amaxes.values[attention]
                stored += [torch.tensor(value / E4M3_MAX) for value in pair]
                notes[linear] |= {"k_amax": pair[0], "v_amax": pair[1]}
            return Made(stored, notes)

        return make


def _fused(rule: Rule, matrices: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The matrices that readers fuse: all of a tensor of ours, but experts each for themselves."""
    if ".experts." not in rule.ours:
        return [matrices]
    size = 2 if rule.kind == "stack_pairs" else 1
    return [matrices[at : at + size] for at in range(0, len(matrices), size)]


def _write_quantization(folder: Path, options: Options, excluded: list[str]) -> None:
    """What the weights are, into config.json and, for ModelOpt's readers, into hf_quant_config.json."""
    config = read_json(folder / "config.json")
    if options.layout == "compressed-tensors":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "ignore": excluded, "config_groups": {"group_0": group}, "kv_cache_scheme": None,
        }  # fmt: skip
    else:
        bits: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
        if options.scheme == "nvfp4":
            bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {"weights": bits, "targets": ["Linear"]}
        if options.scheme != "fp8-block":
            group["input_activations"] = bits
        algorithm = _ALGORITHMS[options.scheme]
        config["quantization_config"] = {
            "quant_method": "modelopt", "quant_algo": algorithm, "ignore": excluded, "producer": _MODELOPT,
            "config_groups": {"group_0": group},
        }  # fmt: skip
        if options.kv_cache:
            config["quantization_config"]["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        legacy: dict[str, Any] = {"quant_algo": algorithm, "exclude_modules": excluded}
        legacy["kv_cache_quant_algo"] = "FP8" if options.kv_cache else None
        if options.scheme == "nvfp4":
            legacy["group_size"] = 16
        write_json(folder / "hf_quant_config.json", {"producer": _MODELOPT, "quantization": legacy})
    write_json(folder / "config.json", config)
