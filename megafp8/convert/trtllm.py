"""Native TensorRT-LLM checkpoints (config.json and rank{N}.safetensors) for any tp x pp, in BF16 and FP8.

For engines up to TensorRT-LLM 1.2; newer releases read Hugging Face folders (fp8_folder). Every tensor of ours is
read once and cut for all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megafp8 import __version__
from megafp8.convert.folder import RECORD_NAME, Beside, is_done
from megafp8.convert.fp8_verify import verify_decoded
from megafp8.convert.fp8_weights import E4M3_MAX, lines_of, quantize_fused
from megafp8.convert.memory import OF_RANKS, check_memory
from megafp8.convert.scales import Amaxes, Calibration, find_amaxes, linears_of
from megafp8.convert.source import Source, open_source
from megafp8.convert.stream import Group, Made, Output, write_groups
from megafp8.convert.trtllm_config import Target, build_config, refuse
from megafp8.convert.trtllm_read import read_ranks
from megafp8.core.errors import ConfigError
from megafp8.core.jsonio import write_json
from megafp8.models import ModelConfig
from megafp8.models.names import split_qkv

Tensor = torch.Tensor
_DTYPES = {"bf16": ("bfloat16", torch.bfloat16), "fp16": ("float16", torch.float16)}
_NORMS = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_layernorm",
    "attention.q_norm": "attention.q_layernorm", "attention.k_norm": "attention.k_layernorm",
}  # fmt: skip


def to_trtllm(
    source: Path | str,
    out: Path | str,
    target: Target,
    *,
    fp8: bool = False,
    kv_cache: bool = False,
    calibration: Calibration | None = None,
    dtype: str = "bf16",
    tokenizer: str | None = None,
    verify: bool = True,
    workers: int = 0,
    say: Callable[[str], Any] = lambda _: None,
) -> None:
    """Write a checkpoint as a native TensorRT-LLM one; see `hf.to_hf` for what holds of all conversions.

    Raises:
        CheckpointError: no checkpoint, damaged, or the comparison is out of bounds; `out` is not there then.
        ConfigError: the format or the target cannot take the model, or there is nothing that scales could come from.
        DataError: the tokenizer or the calibration text is missing or another one.
        ResourceError: `out` is in use, no space, no permission.
    """
    out = Path(out)
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype}: native checkpoints have {', '.join(_DTYPES)}")
    with open_source(source) as model:
        refuse(model.config, target)
        record: dict[str, Any] = {
            "source": str(model.path.absolute()), "source_fingerprint": model.fingerprint, "target": vars(target),
            "fp8": fp8, "kv_cache": kv_cache, "dtype": dtype, "megafp8": __version__,
            "calibration": vars(calibration) if calibration else None,
        }  # fmt: skip
        keys = ("source_fingerprint", "target", "fp8", "kv_cache", "calibration", "dtype")
        if is_done(out, record, keys, verify=verify):
            say(f"{out}: already made from {model.path}")
            return
        if verify:
            check_memory(model.config, say, whole=OF_RANKS)
        amaxes = Amaxes("none needed", {})
        if fp8 or kv_cache:
            amaxes = find_amaxes(model, calibration, tokenizer=tokenizer, kv=kv_cache, say=say)
            say(f"activation scales: {amaxes.origin}")
            _refuse_kept(amaxes if fp8 else None)
        name, torch_dtype = _DTYPES[dtype]
        with Beside(out) as folder:
            ranks = _Ranks(model, target, torch_dtype, amaxes if fp8 else None, amaxes if kv_cache else None)
            made = {"amaxes": [amaxes.inputs, amaxes.keys, amaxes.values], **vars(target)}
            written = write_groups(folder, model, ranks.groups(), options=made, workers=workers, say=say)
            config = build_config(model.config, target, dtype=name, fp8=fp8, fp8_cache=kv_cache)
            write_json(folder / "config.json", config)
            linears = {name: note for notes in written.notes.values() for name, note in notes.items()}
            for line in lines_of(linears, {}) if linears else ():
                say(line)
            found = {}
            if verify:
                found = verify_decoded(read_ranks(folder), model, model.tokenizer(tokenizer), say)
            record |= {"verified": verify, "activations": amaxes.origin, "linears": linears, **found}
            write_json(folder / RECORD_NAME, record)
    say(f"{out}: {target.tp * target.pp} ranks written, {'verified' if verify else 'not verified'}")


def _refuse_kept(amaxes: Amaxes | None) -> None:
    for name, why in amaxes.kept.items() if amaxes else ():
        raise ConfigError(
            f"{name}: {why}; a rank's file cannot name single layers. --calibrate CORPUS gives all a scale, or "
            "use --to modelopt"
        )


class _Ranks:
    """The plan: what of each tensor of ours goes into which rank's file, under which name."""

    def __init__(
        self, source: Source, target: Target, dtype: torch.dtype, fp8: Amaxes | None, cache: Amaxes | None
    ) -> None:
        self.source, self.target, self.dtype, self.fp8, self.cache = source, target, dtype, fp8, cache
        self.config: ModelConfig = source.config
        self.stage_of = {i: s for s, span in enumerate(target.spans(self.config.num_layers)) for i in span}
        self.spans = target.spans(self.config.num_layers)
        self.linears = linears_of(self.config, source.shapes) if fp8 else {}

    def groups(self) -> list[Group]:
        """One group for each of our tensors."""
        return [self._group(name) for name in self.source.shapes]

    def _files(self, stage: int) -> list[str]:
        return [f"rank{stage * self.target.tp + rank}.safetensors" for rank in range(self.target.tp)]

    def _group(self, ours: str) -> Group:
        linear = self.linears.get(ours)
        whole = torch.empty(self.source.shapes[ours], device="meta")
        outputs = []
        for file, name, piece in self._pieces(ours, whole):
            stored = self._stored_dtype(ours) if linear is None else torch.float8_e4m3fn
            outputs.append(Output(file, name, stored, tuple(piece.shape)))
        places = [(output.file, output.name.removesuffix("weight")) for output in outputs]
        if linear is not None:
            for (file, stem), weight in zip(places, tuple(outputs), strict=True):
                count = (weight.shape[0], 1) if ".experts." in ours else (1,)
                outputs.append(Output(file, f"{stem}weights_scaling_factor", torch.float32, count))
                outputs.append(Output(file, f"{stem}activation_scaling_factor", torch.float32, (1,)))
        if self.cache is not None and ours.endswith(".attention.qkv.weight"):
            for file, stem in places:
                stem = stem.removesuffix("qkv.")
                outputs.append(Output(file, f"{stem}kv_cache_scaling_factor", torch.float32, (1,)))
        dtype = torch.float32 if linear else self._stored_dtype(ours)
        # the codes are cut for the ranks when they are made; the rest is cut as it is
        memory = sum(output.bytes for output in outputs) * 2 if linear else self.source.memory(ours, dtype)
        return Group(ours, (ours,), tuple(outputs), self._maker(ours, linear), dtype, memory)

    def _stored_dtype(self, ours: str) -> torch.dtype:
        return torch.float32 if ".router." in ours else self.dtype  # the classes route in fp32

    def _maker(self, ours: str, linear: str | None) -> Callable[[Sequence[Tensor]], Made]:
        def make(tensors: Sequence[Tensor]) -> Made:
            whole, notes, scales, grouped = tensors[0], None, [], ".experts." in ours
            if linear is not None:
                assert self.fp8 is not None
                amax = self.fp8.inputs[linear]
                whole, scale, notes = _quantized(whole, linear, amax, grouped=grouped)
            pieces = [piece for _, _, piece in self._pieces(ours, whole)]
            if linear is not None:
                activation = torch.tensor([amax / E4M3_MAX])
                for rank in range(len(pieces)):  # experts have one piece a rank
                    mine = _share(scale, 0, rank % self.target.moe_ep, self.target.moe_ep) if grouped else scale
                    scales += [mine, activation]
            extra: list[Tensor] = []
            if self.cache is not None and ours.endswith(".attention.qkv.weight"):
                attention = ours.removesuffix(".qkv.weight")
                largest = max(self.cache.keys[attention], self.cache.values[attention])
                extra = [torch.tensor([largest / E4M3_MAX])] * len(pieces)
            return Made([*pieces, *scales, *extra], notes)

        return make

    def _pieces(self, ours: str, whole: Tensor) -> list[tuple[str, str, Tensor]]:
        """(file, name, this rank's part) of one of our tensors for every rank that has one."""
        first, last = self._files(0), self._files(self.target.pp - 1)
        if ours == "embedding.weight":
            found = [(file, "transformer.vocab_embedding.weight", whole) for file in first]
            return found + (self._head(whole) if self.config.tied_embeddings else [])
        if ours == "output.weight":
            return self._head(whole)
        if ours == "position_embedding.weight":
            return [(file, "transformer.position_embedding.weight", whole) for file in first]
        if ours.startswith("final_norm."):
            return [(file, f"transformer.ln_f.{ours.rpartition('.')[2]}", whole) for file in last]
        _, number, rest = ours.split(".", 2)
        stage = self.stage_of[int(number)]
        local = f"transformer.layers.{int(number) - self.spans[stage].start}."
        return [
            (file, local + name, piece)
            for rank, file in enumerate(self._files(stage))
            for name, piece in self._of_layer(rest, whole, rank)
        ]

    def _head(self, whole: Tensor) -> list[tuple[str, str, Tensor]]:
        """The output layer's rows, filled up with zeros to a multiple of tp."""
        rows = math.ceil(self.config.vocab_size / self.target.tp)
        missing = rows * self.target.tp - whole.shape[0]
        if missing:
            whole = torch.cat((whole, whole.new_zeros(missing, whole.shape[1])))
        files = self._files(self.target.pp - 1)
        return [(file, "lm_head.weight", whole[r * rows : (r + 1) * rows]) for r, file in enumerate(files)]

    def _of_layer(self, rest: str, whole: Tensor, rank: int) -> list[tuple[str, Tensor]]:
        """The parts of a layer's tensor that tp rank `rank` has."""
        tp = self.target.tp
        module, _, kind = rest.rpartition(".")
        if module in _NORMS:
            return [(f"{_NORMS[module]}.{kind}", whole)]
        if rest == "mlp.router.weight":
            return [(rest, whole)]
        if rest.startswith("mlp.experts."):
            return [self._of_experts(rest, whole, rank)]
        if module == "attention.qkv":
            return [(f"attention.qkv.{kind}", self._heads(whole, rank))]
        if module in ("attention.out", "mlp.down"):
            name = f"{'attention.dense' if module == 'attention.out' else 'mlp.proj'}.{kind}"
            return [(name, whole if kind == "bias" else _share(whole, 1, rank, tp))]
        if module == "mlp.up":  # not gated
            return [(f"mlp.fc.{kind}", _share(whole, 0, rank, tp))]
        assert module == "mlp.gate_up", rest
        gate, up = (_share(part, 0, rank, tp) for part in whole)
        return [(f"mlp.fc.{kind}", gate), (f"mlp.gate.{kind}", up)]  # fc is the half that is activated

    def _heads(self, whole: Tensor, rank: int) -> Tensor:
        """This rank's query heads, then its key heads, then its value heads."""
        d, kv = self.config.head_dim, self.target.kv_heads(self.config.num_kv_heads, rank)
        q, k, v = split_qkv(self.config, whole)
        rows = slice(kv.start * d, kv.stop * d)
        return torch.cat((_share(q, 0, rank, self.target.tp), k[rows], v[rows]))

    def _of_experts(self, rest: str, whole: Tensor, rank: int) -> tuple[str, Tensor]:
        ep = self.target.moe_ep
        mine = _share(whole, 0, rank % ep, ep)
        shares = self.target.tp // ep
        if rest == "mlp.experts.down":
            return "mlp.proj.weight", _share(mine, 2, rank // ep, shares)
        part = _share(mine, 2, rank // ep, shares)  # [E, 2, F, H], gate first
        return "mlp.fc.weight", torch.cat((part[:, 1], part[:, 0]), 1)  # up first: the reverse of the dense names


def _share(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    size = x.shape[dim] // ranks
    return x.narrow(dim, rank * size, size)


def _quantized(whole: Tensor, linear: str, amax: float, *, grouped: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Codes of a whole tensor of ours, its scales ([E, 1] for experts, else a scalar), and notes.

    The scale is the whole matrix's, whoever has which part of it.
    """
    matrices = list(whole) if grouped else [whole]
    codes, scales, notes = [], [], {}
    for number, matrix in enumerate(matrices):
        (code, scale, _), note = quantize_fused("fp8", [matrix.reshape(-1, matrix.shape[-1])], amax)
        codes.append(code.view(matrix.shape))
        scales.append(scale.reshape(1))
        notes[f"{linear}[{number}]" if grouped else linear] = note
    if grouped:
        return torch.stack(codes), torch.stack(scales), notes
    return codes[0], scales[0], notes
