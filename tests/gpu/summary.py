"""A part's figures as lines for the screen."""

from __future__ import annotations

from typing import Any


def summary_lines(name: str, found: dict[str, Any]) -> list[str]:
    """What a part found, briefly."""
    lines = []
    if name.startswith("correctness"):
        lines = [line for recipe, result in found.get("recipes", {}).items() for line in _recipe(recipe, result)]
    elif name.startswith("train"):
        lines = _training(found) if found.get("losses") else []
    elif "linears" in found:
        lines = [_linear(kind, figures) for kind, figures in found["linears"].items()]
    reason = f": {brief(found['reason'])}" if found.get("reason") else ""
    return [*lines, f"{found['status']}{reason}"]


def brief(reason: str) -> str:
    """Without the list of what would work, which stands in the JSON."""
    return reason.split("; what runs on this machine")[0]


def _recipe(recipe: str, result: dict[str, Any]) -> list[str]:
    checks = result.get("checks", [])
    good = sum(check["passed"] for check in checks)
    reason = f": {brief(result['reason'])}" if result.get("reason") else ""
    lines = [f"{recipe:<10} {result['status']}, {good} of {len(checks)} checks{reason}"]
    lines += [
        f"           {check['what']}: {check['error']:.3g} exceeds {check['bound']:.3g}"
        for check in checks
        if not check["passed"]
    ]
    return lines


def _training(found: dict[str, Any]) -> list[str]:
    losses = found["losses"]
    lines = [
        f"{found['backend']} ({found['why']}); {found['parameters'] / 1e9:.2f}B parameters, micro-batch "
        f"{found['micro_batch']} x {found['sequence_length']}, {found['micro_batches']} a step",
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps; "
        f"first step {found['first_step_seconds']:.1f} s",
    ]
    if "tokens_per_second" in found:
        lines.append(
            f"{found['tokens_per_second']:,.0f} tokens/s, {found['tflops_full']:.1f} TFLOP/s, "
            f"MFU {found['mfu_full']:.1%} "
            f"(attention counted causal: {found['mfu_causal']:.1%}) of {found['peak_flops'] / 1e12:.1f} TFLOP/s "
            f"({found['peak_source']}), peak memory {found['peak_memory_bytes'] / 2**30:.1f} GiB"
        )
    return lines


def against_bf16(parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each FP8 training beside the BF16 one: speed, memory, and the loss over the steps that both took."""
    base, compared = parts.get("train bf16", {}), {}
    for name, found in parts.items():
        if name == "train bf16" or not ("tokens_per_second" in found and "tokens_per_second" in base):
            continue
        last = list(zip(found["losses"], base["losses"]))[-10:]
        compared[name] = {
            "speedup": found["tokens_per_second"] / base["tokens_per_second"],
            "peak_memory": found["peak_memory_bytes"] / base["peak_memory_bytes"],
            "mean_loss_difference": sum(mine - other for mine, other in last) / len(last),
        }
    return compared


def comparison_lines(compared: dict[str, dict[str, float]]) -> list[str]:
    """`against_bf16` for the screen."""
    return [
        f"{name}: {ratio['speedup']:.2f} x BF16's tokens/s, {ratio['peak_memory']:.2f} x its memory, loss "
        f"{ratio['mean_loss_difference']:+.4f} (mean of the last steps)"
        for name, ratio in compared.items()
    ]


def _linear(kind: str, figures: dict[str, Any]) -> str:
    if "reason" in figures:
        return f"{kind:<10} skipped: {brief(figures['reason'])}"
    return f"{kind:<10} {figures['milliseconds']:.3f} ms forward and backward, {figures['speedup']:.2f} x BF16"
