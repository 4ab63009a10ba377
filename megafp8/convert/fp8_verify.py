"""Does a quantized folder say what the model says? Every tensor, every scale, and the logits of a server of it.

The folder is read by `fp8_read`, its weights are handed to transformers' own class of the model, which knows nothing of
our names, and inputs of linears are rounded there as the stored scales say.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megafp8.convert.by_layer import Read, TheirModel, our_logits, our_model
from megafp8.convert.fp8_inputs import CLIPPED, E4M3_MAX, SMALLEST, Inputs, as_served
from megafp8.convert.fp8_read import Decoded, Lazy, read_quantized
from megafp8.convert.optional import load
from megafp8.convert.source import Source, unrounded
from megafp8.convert.verify_hf import largest_of, logit_bound, sample_ids
from megafp8.core.errors import CheckpointError
from megafp8.core.jsonio import write_json
from megafp8.data.tokenizer import load_tokenizer
from megafp8.models import ModelConfig
from megafp8.models.decoder import Decoder
from megafp8.models.names import join, resolved_rules, split
from megafp8.nn.cache import KeyValueCache

Tensor = torch.Tensor
# Relative RMS error of rounding: E4M3 has 3 mantissa bits, about 0.027 for normals however they are distributed. E2M1
# under block scales: 0.09 to 0.11 for normal weights.
_RMS = {"FP8": 0.03, "FP8_CHANNEL": 0.03, "FP8_PB_WO": 0.03, "NVFP4": 0.13}


def verify_quantized(folder: Path, source: Source, spec: str, say: Callable[[str], Any]) -> dict[str, Any]:
    """`verify_decoded` of a quantized Hugging Face folder."""
    return verify_decoded(read_quantized(folder), source, spec, say)


def verify_decoded(decoded: Decoded, source: Source, spec: str, say: Callable[[str], Any]) -> dict[str, Any]:
    """Compare what a reader found with the source; returns what was found, for the record.

    Raises:
        CheckpointError: anything out of bounds; all of it, in one line.
        ConfigError: transformers is not installed.
    """
    transformers = load("transformers", "convert with --no-verify")
    problems, worst = _compare_tensors(decoded, source)
    say(f"tensors: {len(decoded.steps)} quantized, largest relative RMS error {worst:.4f}, the others exact")
    ids, routed = sample_ids(source.config, load_tokenizer(spec)), bool(source.config.moe.num_experts)
    theirs, inputs, decode = decoded_model(transformers, decoded), Inputs(decoded), as_ours(decoded, source.config)
    reference = our_logits(source.config, lambda name: source.read(name, torch.float32), ids, torch.float32)
    exact, mine = (our_logits(source.config, decode, ids, dtype) for dtype in (torch.float64, torch.float32))
    plain = theirs.logits(ids, torch.float32)
    bound, largest = logit_bound(exact, mine, routed=routed), largest_of(mine - plain, routed)
    if not largest <= bound:
        problems.append(f"logits of the decoded weights: transformers' differ by {largest:.3g} (bound {bound:.3g})")
    quantized = theirs.logits(ids, torch.float32, inputs.within) if decoded.steps else plain
    problems += inputs.problems()
    kinds = {"weights": plain, **({"weights and activations": quantized} if decoded.steps else {})}
    figures = {what: _distance(reference, logits, ids) for what, logits in kinds.items()}
    if decoded.kv_scales:
        same = our_model(source.config, decode, torch.float32)
        figures["weights, FP8 cache"] = _distance(reference, _with_cache(same, decoded, ids, problems), ids)
    for what, found in figures.items():
        say(f"{what}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    if decoded.input_scales:
        shares = inputs.shares
        most = max(shares, key=shares.__getitem__, default="")
        where = f"; most in {most}, {shares[most]:.3%}" if most else ""
        say(f"clipped inputs: in {len(shares)} of {len(decoded.input_scales)} linears{where}")
    _judge(figures, problems)
    if problems:
        raise CheckpointError(f"the written folder does not say what the model says: {'; '.join(problems[:8])}")
    return {"comparisons": figures, "clipped": inputs.shares, "largest_rms": worst}


def _compare_tensors(decoded: Decoded, source: Source) -> tuple[list[str], float]:
    """Each stored tensor against the source's fp32: exact where not quantized, half a step where it is."""
    problems, worst, left = [], 0.0, set(decoded.tensors)
    for rule in resolved_rules(source.config):
        whole = source.read(rule.ours, torch.float32)
        for name, wanted in zip(rule.theirs, split(source.config, rule, whole), strict=True):
            found = decoded.tensors.get(name)
            if found is None:
                problems.append(f"{name} is missing")
                continue
            left.discard(name)
            if name not in decoded.steps:
                stored = wanted if unrounded(rule.ours) else wanted.to(found.dtype)
                if found.shape != stored.shape or not torch.equal(found, stored):
                    problems.append(f"{name} is not the model's, rounded to {found.dtype}")
                continue
            wanted = wanted.T if rule.kind.startswith("conv1d") else wanted
            if found.shape != wanted.shape:
                problems.append(f"{name} has shape {tuple(found.shape)}, not {tuple(wanted.shape)}")
                continue
            error = (found - wanted).abs()
            rms = float(error.norm() / wanted.norm().clamp_min(1e-30))
            worst = max(worst, rms)
            if not rms <= _RMS[decoded.algorithm] or not bool((error <= _half_step(decoded, name, wanted)).all()):
                problems.append(f"{name} is off by {float(error.max()):.3g}, {rms:.3f} relative RMS: not its rounding")
    return problems + [f"{name} belongs to no tensor of the model" for name in sorted(left)], worst


def _half_step(decoded: Decoded, name: str, wanted: Tensor) -> Tensor:
    """The most that rounding to the format moves each element; 2^-20 for the arithmetic of scales in fp32."""
    step = decoded.steps[name]
    if decoded.algorithm == "NVFP4":  # codes 4 and 6 lie 2 apart; a block scale rounded down clips up to 1/16 of 6
        return 1.4 * step + wanted.abs() * 2.0**-20
    return torch.maximum(wanted.abs() * 2.0**-4, step * 2.0**-10) * (1 + 2.0**-20)


def as_ours(decoded: Decoded, config: ModelConfig) -> Read:
    """The decoded weights under our names, fp32, each when asked for."""
    rules = {rule.ours: rule for rule in resolved_rules(config)}

    def read(name: str) -> Tensor:
        rule = rules[name]
        parts = [decoded.tensors[theirs] for theirs in rule.theirs]
        if rule.kind.startswith("conv1d") and rule.theirs[0] in decoded.steps:
            parts = [part.T for part in parts]
        whole: Tensor = join(config, rule, parts).float()
        return whole

    return read


def decoded_model(transformers: Any, decoded: Decoded) -> TheirModel:
    """transformers' own model over the decoded weights."""
    with tempfile.TemporaryDirectory() as place:  # as it reads a folder's
        write_json(Path(place) / "config.json", decoded.config)
        config = transformers.AutoConfig.from_pretrained(place, local_files_only=True)
    tensors = Lazy()
    tensors.made |= decoded.tensors.made
    if decoded.config["model_type"] == "gpt2":  # its class keeps [in, out]
        tensors.made |= {name: partial(_turned, decoded, name) for name in decoded.steps}
    return TheirModel(transformers, config, tensors, decoded.shapes.__getitem__)


def _turned(decoded: Decoded, name: str) -> Tensor:
    return decoded.tensors[name].T.contiguous()


class _Fp8Cache(KeyValueCache):
    """Keys and values as FP8 codes under the stored scales, from the first token on."""

    def __init__(self, batch: int, slots: int, scales: dict[str, tuple[float, float]], problems: list[str]) -> None:
        super().__init__(batch, slots)
        self.scales, self.problems = scales, problems

    @property
    def is_first(self) -> bool:
        return False

    def extend(self, name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Round them, and look whether the scales fit."""
        pair = []
        for x, scale, what in zip((k, v), self.scales[name], "kv", strict=True):
            share, largest = float((x.abs() > E4M3_MAX * scale).double().mean()), float(x.abs().max())
            if share > CLIPPED or largest < SMALLEST * E4M3_MAX * scale:
                self.problems.append(f"{name}: {what}_scale {scale:.3g} does not fit values up to {largest:.3g}")
            pair.append(as_served(x, scale))
        return super().extend(name, *pair)


def _with_cache(model: Decoder, decoded: Decoded, ids: Tensor, problems: list[str]) -> Tensor:
    """Logits [S, V] with an FP8 cache, by our engine: transformers has none."""
    scales = {f"layers.{number}.attention": pair for number, pair in enumerate(_in_order(decoded.kv_scales))}
    cache = _Fp8Cache(len(ids), ids.shape[1], scales, problems)
    with torch.inference_mode():
        logits = model(ids, positions=torch.arange(ids.shape[1])[None], cache=cache)
    assert isinstance(logits, Tensor)
    return logits[0].double()


def _in_order(scales: dict[str, tuple[float, float]]) -> list[tuple[float, float]]:
    def number(module: str) -> int:
        return next(int(part) for part in module.split(".") if part.isdigit())

    return [scales[module] for module in sorted(scales, key=number)]


def _distance(reference: Tensor, found: Tensor, ids: Tensor) -> dict[str, float]:
    """Of logits [S, V]: KL in nats, top-1 agreement, and both perplexities on the text itself."""
    log_p, log_q = torch.log_softmax(reference, -1), torch.log_softmax(found, -1)
    losses = [float(F.cross_entropy(logits[:-1], ids[0, 1:])) for logits in (reference, found)]
    return {
        "KL": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "largest": float((reference - found).abs().max()),
        "top-1 agreement": float((reference.argmax(-1) == found.argmax(-1)).double().mean()),
        "perplexity before": math.exp(min(losses[0], 700)),
        "perplexity after": math.exp(min(losses[1], 700)),
    }


def _judge(figures: dict[str, dict[str, float]], problems: list[str]) -> None:
    """Rounding inputs too may cost a few times what rounding the weights costs; a wrong scale costs far more."""
    weights = figures["weights"]["KL"]
    for what, found in figures.items():
        bound = 0.02 + 20 * max(weights, 0.0)
        if not found["KL"] <= bound:  # NaN as well
            problems.append(f"{what}: KL {found['KL']:.3g} nats is above {bound:.3g}")
