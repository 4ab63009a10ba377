"""The learning rate as a pure function of the step: nothing to save, nothing to resume."""

from __future__ import annotations

import math

from megafp8.optim.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of step `step`, counted from 1 (the step after n finished ones is n + 1).

    With warm-up w and decay end d (`decay_steps`, or `total_steps`): step w has the peak rate `lr`, step d
    and all after it `min_lr`. Warm-up is lr * step / w. Then, with t = (step - w) / (d - w):

        cosine        min_lr + (lr - min_lr) * (1 + cos(pi t)) / 2         (arXiv 1608.03983)
        linear        lr + (min_lr - lr) * t
        wsd           lr, then linear to min_lr over the last `wsd_decay_steps`  (arXiv 2404.06395)
        constant      lr
        inverse_sqrt  max(min_lr, lr * sqrt(max(w, 1) / step)), whatever d        (arXiv 1706.03762)
    """
    assert step >= 0, "steps count from 1"
    warmup, end = config.warmup_steps, config.decay_steps or total_steps
    if step < warmup:
        return config.lr * step / warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "inverse_sqrt":
        return max(config.min_lr, config.lr * math.sqrt(max(warmup, 1) / max(step, 1)))
    if step >= end:
        return config.min_lr
    if config.schedule == "wsd":
        warmup = end - config.wsd_decay_steps  # the decay begins here
        if step <= warmup:
            return config.lr
    done = (step - warmup) / (end - warmup)
    if config.schedule == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return config.lr + (config.min_lr - config.lr) * done
