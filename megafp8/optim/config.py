"""OptimizerConfig: the [optimizer] section and its rules. No torch, so that `megafp8 check` stays light."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal

from pydantic import Field

from megafp8.core.config import config_dataclass

MomentDtype = Literal["fp32", "bf16", "fp8"]
MOMENT_BLOCK = 128  # elements of a narrow moment, along the last dim, that share a scale


@config_dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) or Muon, and the learning-rate schedule."""

    name: Annotated[
        Literal["adamw", "muon"],
        Field(description="muon: hidden matrices by Muon, embeddings, output, norms, biases and routers by AdamW"),
    ] = "adamw"
    kernel: Annotated[
        Literal["auto", "te", "apex", "torch"],
        Field(description="fused AdamW of Transformer Engine, apex or torch; auto = the first that works"),
    ] = "auto"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False, description="peak learning rate, after warm-up")] = 3e-4
    min_lr: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="rate at which decay ends; constant has none")
    ] = 3e-5
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the mean gradient, per step")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the mean squared gradient, per step")] = 0.95
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False, description="added to the second moment's root")] = 1e-8
    exp_avg_dtype: Annotated[
        MomentDtype, Field(description="AdamW's mean gradient: fp32, as the masters; bf16; fp8, E4M3 in blocks of 128")
    ] = "fp32"
    exp_avg_sq_dtype: Annotated[
        MomentDtype, Field(description="AdamW's mean squared gradient: fp32, as the masters; bf16; fp8, E5M2 in blocks")
    ] = "fp32"
    weight_decay: Annotated[
        float,
        Field(ge=0, allow_inf_nan=False, description="decoupled: a step scales weights by 1 - lr * this"),
    ] = 0.1
    decay_embeddings: Annotated[bool, Field(description="also decay embeddings (and tied output weights)")] = True
    decay_norms_biases: Annotated[bool, Field(description="also decay norm weights and biases")] = False
    muon_momentum: Annotated[float, Field(ge=0, lt=1, description="decay of Muon's mean gradient, per step")] = 0.95
    muon_nesterov: Annotated[bool, Field(description="look one step ahead along the momentum")] = True
    muon_steps: Annotated[int, Field(ge=1, le=99, description="Newton-Schulz iterations")] = 5
    muon_rms: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False, description="root mean square of an update at rate 1; AdamW's is about this"),
    ] = 0.2
    clip_grad: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="largest global gradient norm; 0 = no clipping")
    ] = 1.0
    schedule: Annotated[
        Literal["cosine", "wsd", "linear", "constant", "inverse_sqrt"],
        Field(description="shape of the learning rate after warm-up"),
    ] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0, description="steps of linear warm-up, the last at the peak")] = 0
    warmup_tokens: Annotated[int, Field(ge=0, description="the same in tokens; 0 = warmup_steps says it")] = 0
    decay_steps: Annotated[int, Field(ge=0, description="step at which decay ends; 0 = train.steps")] = 0
    decay_tokens: Annotated[int, Field(ge=0, description="the same in tokens; 0 = decay_steps says it")] = 0
    wsd_decay_steps: Annotated[int, Field(ge=0, description="steps of the final decay, wsd only")] = 0
    wsd_decay_tokens: Annotated[int, Field(ge=0, description="the same in tokens; 0 = wsd_decay_steps")] = 0

    def __post_init__(self) -> None:
        problems = []
        if self.min_lr > self.lr and self.schedule != "constant":
            problems.append(f"min_lr {self.min_lr:g} is above lr {self.lr:g}; use at most {self.lr:g}")
        for part in ("warmup", "decay", "wsd_decay"):
            steps, tokens = getattr(self, f"{part}_steps"), getattr(self, f"{part}_tokens")
            if steps and tokens:
                problems.append(f"{part}_steps {steps} and {part}_tokens {tokens} say one thing twice; set one")
        tail = {n: getattr(self, n) for n in ("wsd_decay_steps", "wsd_decay_tokens") if getattr(self, n)}
        if self.schedule == "wsd" and not tail:
            problems.append("schedule wsd needs wsd_decay_steps > 0 (or wsd_decay_tokens), its final decay")
        if self.schedule != "wsd":
            problems += [f"{n} {v} is for wsd, not {self.schedule}; use 0 or wsd" for n, v in tail.items()]
        if self.has_narrow_moments and self.kernel in ("te", "apex"):
            asked = ", ".join(n for n in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(self, n) != "fp32")
            problems.append(
                f'kernel {self.kernel!r} updates moments in fp32 only, and {asked} asks for less; use kernel "auto"'
            )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def has_narrow_moments(self) -> bool:
        """Whether a moment is kept in fewer bits than the masters."""
        return (self.exp_avg_dtype, self.exp_avg_sq_dtype) != ("fp32", "fp32")


def moments_bytes(count: int, dtypes: tuple[str, str], wide: int) -> int:
    """Bytes of both moments of `count` elements whose masters have `wide` bytes.

    A block of 128 has one byte for its scale in FP8, and, if a moment is narrow, four for its place.
    """
    element = sum({"fp32": wide, "bf16": 2, "fp8": 1}[dtype] for dtype in dtypes)
    block = dtypes.count("fp8") + 4 * (dtypes != ("fp32", "fp32"))
    return count * element + ceil(count / MOMENT_BLOCK) * block
