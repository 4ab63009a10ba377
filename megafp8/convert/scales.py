"""Where static activation scales come from: the run's own amax histories, or a calibration on real text. Never a guess.

A scale is amax / 448 (value = code x scale), the convention of ModelOpt, TensorRT-LLM and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint import TensorReader
from megafp8.checkpoint.manifest import MANIFEST_NAME
from megafp8.convert.source import Source
from megafp8.core.config import build
from megafp8.core.errors import CheckpointError, ConfigError
from megafp8.data.tokenizer import load_tokenizer
from megafp8.infer.calibrate import calibrate
from megafp8.infer.sources import dataset_tokens, text_tokens
from megafp8.infer.weights import build_model
from megafp8.models import ModelConfig
from megafp8.models.config import quantizable_shapes
from megafp8.nn.precision import PrecisionConfig, plan_gemms
from megafp8.nn.states import PREFIX

_LENGTH = 512  # tokens of a calibration sample, at most


@dataclass(frozen=True)
class Calibration:
    """What to calibrate with: a .bin/.idx prefix or a text file, so many samples of it, and which percentile counts."""

    corpus: str
    samples: int = 128
    percentile: float = 100.0

    def __post_init__(self) -> None:
        if self.samples < 1 or not 90 <= self.percentile <= 100:
            raise ConfigError(
                f"--samples {self.samples} must be at least 1, --percentile {self.percentile} lie between 90 and 100"
            )


@dataclass(frozen=True)
class Amaxes:
    """How large activations get.

    Attributes:
        origin: where the numbers come from, for people and for the record.
        inputs: by linear ("layers.3.mlp.down"); without those that stay unquantized.
        keys, values: by attention layer ("layers.3.attention"); empty where no calibration was made.
        kept: {linear: why it stays in the model's dtype}.
    """

    origin: str
    inputs: Mapping[str, float]
    keys: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)


def find_amaxes(
    source: Source,
    calibration: Calibration | None,
    *,
    tokenizer: str | None,
    kv: bool,
    say: Callable[[str], Any] = lambda _: None,
) -> Amaxes:
    """The amax of every linear's input.

    Raises:
        ConfigError: there is neither a history nor something to calibrate with; or keys and values are asked for
            without a calibration.
        CheckpointError: a history that holds nothing.
        DataError: text that cannot be read, or of another tokenizer.
    """
    if calibration is not None:
        return _calibrated(source, calibration, tokenizer, say)
    if kv:
        raise ConfigError("an FP8 KV cache needs scales of keys and values, which training does not keep: --calibrate")
    precision = _trained(source)
    if precision is None:
        raise ConfigError(
            f"{source.path}: holds no amax history of delayed scaling, and no scale is made up; "
            "give --calibrate CORPUS (a .bin/.idx prefix or a text file of what the model will read)"
        )
    return _history(source, precision)


def _trained(source: Source) -> PrecisionConfig | None:
    """The run's precision, if its checkpoint holds histories of delayed scaling."""
    if not (source.path / MANIFEST_NAME).is_file():
        return None
    with TensorReader(source.path) as reader:
        section = reader.meta.get("config", {}).get("precision")
        if section is None or not any(name.startswith(PREFIX) for name in reader.shapes):
            return None
    return build(PrecisionConfig, section)


def _history(source: Source, precision: PrecisionConfig) -> Amaxes:
    plan, _ = plan_gemms(precision, list(quantizable_shapes(source.config)), source.config.num_layers)
    inputs: dict[str, float] = {}
    kept: dict[str, str] = {}
    with TensorReader(source.path) as reader:
        for linear, recipe in plan.items():
            name = f"{PREFIX}{linear}.input.amax_history"
            if recipe == "none":
                kept[linear] = "training kept it in its own dtype"
                continue
            if name not in reader.shapes:
                raise ConfigError(f"{linear}: recipe {recipe} keeps no amax history; give --calibrate CORPUS")
            if precision.smooth_swiglu and linear.endswith(".down"):
                raise ConfigError(
                    f"{linear}: Smooth-SwiGLU's history is of its smoothed input, which no reader has; "
                    "give --calibrate CORPUS"
                )
            inputs[linear] = float(reader.read(name).max())
            if not 0 < inputs[linear] < float("inf"):
                raise CheckpointError(f"{source.path}: {name} holds {inputs[linear]}; give --calibrate CORPUS")
    return Amaxes("amax history of the run (delayed scaling)", inputs, kept=kept)


def _calibrated(source: Source, calibration: Calibration, tokenizer: str | None, say: Callable[[str], Any]) -> Amaxes:
    spec = load_tokenizer(source.tokenizer(tokenizer))
    text = Path(calibration.corpus).is_file()
    tokens = text_tokens(calibration.corpus, spec)[0] if text else dataset_tokens(calibration.corpus, spec)
    length = min(_LENGTH, source.config.max_sequence_length, len(tokens))
    available = len(tokens) // length
    samples = min(calibration.samples, available)
    if samples < calibration.samples:
        say(f"{calibration.corpus}: holds {available} samples of {length} tokens, {calibration.samples} were asked for")
    model = build_model(source.config, {name: source.read(name, torch.bfloat16) for name in source.shapes})

    def batches() -> Iterator[torch.Tensor]:
        # spread over the whole corpus, which may be sorted by source
        for number in range(samples):
            start = number * available // samples * length
            say(f"calibrating: sample {number + 1} of {samples}") if number % 32 == 0 else None
            yield torch.as_tensor(tokens[start : start + length].astype("int64"))[None]

    percent = calibration.percentile
    ranges = calibrate(model, batches(), histogram=percent < 100)
    wanted = [name for name in quantizable_shapes(source.config) if name in ranges.inputs]
    kept = {n: "no calibration token reached it" for n in wanted if ranges.inputs[n].amax == 0}
    how = "largest" if percent == 100 else f"percentile {percent:g}"
    return Amaxes(
        f"calibration: {samples} samples of {length} tokens of {calibration.corpus}, {how}",
        {name: ranges.inputs[name].percentile(percent) for name in wanted if name not in kept},
        {name: spread.percentile(percent) for name, spread in ranges.keys.items()},
        {name: spread.percentile(percent) for name, spread in ranges.values.items()},
        kept,
    )


def linears_of(config: ModelConfig, names: Iterable[str]) -> dict[str, str]:
    """{tensor of ours: the linear that it is the weight of}, of those among `names` that FP8 may take."""
    shapes = quantizable_shapes(config)
    return {ours: name for ours in names if (name := ours.removesuffix(".weight")) in shapes}
