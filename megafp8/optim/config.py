"""OptimizerConfig: the [optimizer] section and its rules. No torch, so that `megafp8 check` stays light."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megafp8.core.config import config_dataclass


@config_dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) and its learning-rate schedule."""

    kernel: Annotated[
        Literal["auto", "te", "apex", "torch"],
        Field(description="fused AdamW of Transformer Engine, apex or torch; auto = the first that works"),
    ] = "auto"
    lr: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="peak learning rate, after warm-up")
    ] = 3e-4
    min_lr: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="rate at which decay ends; constant has none")
    ] = 3e-5
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the mean gradient, per step")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the mean squared gradient, per step")] = (
        0.95
    )
    eps: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="added to the second moment's root")
    ] = 1e-8
    weight_decay: Annotated[
        float,
        Field(ge=0, allow_inf_nan=False, description="decoupled: a step scales weights by 1 - lr * this"),
    ] = 0.1
    decay_embeddings: Annotated[
        bool, Field(description="also decay embeddings (and tied output weights)")
    ] = True
    decay_norms_biases: Annotated[bool, Field(description="also decay norm weights and biases")] = False
    clip_grad: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="largest global gradient norm; 0 = no clipping")
    ] = 1.0
    schedule: Annotated[
        Literal["cosine", "wsd", "linear", "constant", "inverse_sqrt"],
        Field(description="shape of the learning rate after warm-up"),
    ] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0, description="steps of linear warm-up, the last at the peak")] = 0
    decay_steps: Annotated[int, Field(ge=0, description="step at which decay ends; 0 = train.steps")] = 0
    wsd_decay_steps: Annotated[int, Field(ge=0, description="steps of the final decay, wsd only")] = 0

    def __post_init__(self) -> None:
        problems = []
        if self.min_lr > self.lr and self.schedule != "constant":
            problems.append(f"min_lr {self.min_lr:g} is above lr {self.lr:g}; use at most {self.lr:g}")
        if self.schedule == "wsd" and self.wsd_decay_steps == 0:
            problems.append("schedule wsd needs wsd_decay_steps > 0, the length of its final decay")
        if self.schedule != "wsd" and self.wsd_decay_steps > 0:
            problems.append(
                f"wsd_decay_steps {self.wsd_decay_steps} is for wsd, not {self.schedule}; use 0 or wsd"
            )
        if problems:
            raise ValueError("; ".join(problems))


def check_schedule(config: OptimizerConfig, total_steps: int) -> list[str]:
    """Rules that need the length of the run: a line each with the way out; empty if all hold."""
    end = config.decay_steps or total_steps
    origin = "optimizer.decay_steps" if config.decay_steps else "train.steps"
    if config.schedule in ("constant", "inverse_sqrt"):
        return []
    warmup, tail = config.warmup_steps, config.wsd_decay_steps
    if warmup >= end:
        return [f"optimizer.warmup_steps = {warmup} is not before {origin} = {end}; use at most {end - 1}"]
    if warmup + tail > end:
        return [
            f"optimizer.warmup_steps {warmup} + wsd_decay_steps {tail} is beyond {origin} = {end}; "
            f"use wsd_decay_steps <= {end - warmup}"
        ]
    return []
