"""Foreign names and ours, both directions from one table of rules (`families/*`).

Works on whole tensors by their methods; no torch import is needed. What a family's foreign class cannot express is
refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megafp8.core.config import nearest, to_dict
from megafp8.core.errors import CheckpointError, ConfigError
from megafp8.models.config import ModelConfig
from megafp8.models.families import FAMILIES
from megafp8.models.families.rules import Family, Kind, Rule

Tensor = Any
# Buffers that older exports carry; they are arithmetic, not weights.
_IGNORED_ENDINGS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")


def to_hf_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our whole tensors under Hugging Face's names and shapes; any dtype, contiguous.

    Raises:
        CheckpointError: a tensor is missing or unknown.
    """
    theirs: dict[str, Tensor] = {}
    left = dict(tensors)
    for rule in _rules(config):
        if rule.ours not in left:
            raise CheckpointError(f"{rule.ours} is missing; a {config.family} model of this config has it")
        parts = _split(config, rule.kind, left.pop(rule.ours))
        theirs.update(zip(rule.theirs, parts, strict=True))
    if left:
        raise CheckpointError(f"{sorted(left)[0]} has no Hugging Face name in family {config.family}")
    return theirs


def from_hf_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's tensors under our names and shapes.

    Raises:
        CheckpointError: a tensor is missing, unknown, or not of the shape that the config asks for.
    """
    left = {name: t for name, t in tensors.items() if not name.endswith(_IGNORED_ENDINGS)}
    ours: dict[str, Tensor] = {}
    for rule in _rules(config):
        missing = [name for name in rule.theirs if name not in left]
        if missing:
            raise CheckpointError(f"{missing[0]} is missing{nearest(missing[0], left)}")
        ours[rule.ours] = _join(config, rule.kind, [left.pop(name) for name in rule.theirs])
    if config.tied_embeddings:
        left.pop("lm_head.weight", None)  # some exports repeat the embedding
    if left:
        raise CheckpointError(f"{sorted(left)[0]} has no place in a {config.family} model of this config")
    return ours


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The model's config.json, without tokenizer ids and dtype.

    Raises:
        ConfigError: the family's Hugging Face class cannot express this config.
    """
    family = FAMILIES[config.family]
    section = to_dict(config)
    problems = [problem.split(": it ", 1) for problem in family.problems(section)]
    if problems:
        who = f"Hugging Face's {family.model_type}"
        raise ConfigError("\n".join(f"{what} cannot be exported: {who} {has}" for what, has in problems))
    return family.to_config(section)


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Our config from a config.json.

    Raises:
        ConfigError: a model type that no family serves.
    """
    families: dict[str, Family] = {family.model_type: family for family in FAMILIES.values()}
    model_type = str(config.get("model_type"))
    if model_type not in families:
        raise ConfigError(f"model_type {model_type!r} is not one of: {', '.join(families)}")
    try:
        return ModelConfig(**families[model_type].from_config(config))
    except ValueError as error:
        raise ConfigError(f"config.json of a {model_type}: {error}") from error


def _rules(config: ModelConfig) -> Iterator[Rule]:
    """The rules of the tensors that this config has, numbers of layers and experts filled in."""
    experts = range(config.moe.num_experts)
    for rule in FAMILIES[config.family].rules:
        if "{i}" not in rule.ours:
            if _has(config, rule.ours):
                yield rule
            continue
        for i in range(config.num_layers):
            if _has(config, rule.ours, i):
                numbers = experts if "{e}" in rule.theirs[0] else range(1)
                names = (name.format(i=i, e=e) for e in numbers for name in rule.theirs)
                yield Rule(rule.ours.format(i=i), tuple(names), rule.kind)


def _has(config: ModelConfig, name: str, layer: int = -1) -> bool:
    """Whether the config has the tensor of this rule's name, in this layer."""
    if name == "output.weight":
        return not config.tied_embeddings
    if ".attention." in name and config.mla.enabled:
        latent = any(f".{part}." in name for part in ("q_down", "q_norm", "q_up"))
        return bool(config.mla.q_lora_rank) == latent if latent or ".q." in name else True
    if ".q_norm." in name or ".k_norm." in name:
        return config.qk_norm
    if ".mlp." in name:
        return _has_mlp(config, name, layer)
    if name.endswith(".bias") and "norm" not in name:
        return config.attention_bias
    return True


def _has_mlp(config: ModelConfig, name: str, layer: int) -> bool:
    moe = config.moe
    if ".router.bias" in name:
        return moe.has_bias and moe.is_moe_layer(layer)
    if ".mlp.shared." in name:
        return moe.num_shared_experts > 0 and moe.is_moe_layer(layer)
    if ".router." in name or ".experts." in name:
        return moe.is_moe_layer(layer)
    return not moe.is_moe_layer(layer) and (config.mlp_bias or not name.endswith(".bias"))


def _split(config: ModelConfig, kind: Kind, tensor: Tensor) -> list[Tensor]:
    match kind:
        case "copy":
            parts = [tensor]
        case "conv1d":
            parts = [tensor.T]
        case "stack":
            parts = list(tensor)
        case "stack_pairs":
            parts = [matrix for pair in tensor for matrix in pair]
        case _:
            g, d = config.num_kv_heads, config.head_dim
            r = config.num_attention_heads // g
            grouped = tensor.reshape(g, r + 2, d, *tensor.shape[1:])
            parts = [grouped[:, :r], grouped[:, r], grouped[:, r + 1]]
            parts = [part.reshape(-1, *tensor.shape[1:]) for part in parts]
            if kind != "qkv":
                whole = tensor.new_empty(tensor.shape)
                for part, rows in zip(parts, _rows(config), strict=True):
                    whole[rows] = part
                parts = [whole.T if kind == "conv1d_qkv" else whole]
    return [part.contiguous() for part in parts]


def _join(config: ModelConfig, kind: Kind, parts: list[Tensor]) -> Tensor:
    match kind:
        case "copy":
            return parts[0]
        case "conv1d":
            return parts[0].T.contiguous()
        case "stack" | "stack_pairs":
            whole = parts[0].new_empty((len(parts), *parts[0].shape))
            for i, part in enumerate(parts):
                whole[i] = part
            return whole if kind == "stack" else whole.reshape(-1, 2, *parts[0].shape)
        case "conv1d_qkv":
            parts = [parts[0].T]
    if len(parts) == 1:
        parts = [parts[0][rows] for rows in _rows(config)]
    g, d = config.num_kv_heads, config.head_dim
    r = config.num_attention_heads // g
    rest = parts[0].shape[1:]
    whole = parts[0].new_empty((g, r + 2, d, *rest))
    whole[:, :r] = parts[0].reshape(g, r, d, *rest)
    whole[:, r] = parts[1].reshape(g, d, *rest)
    whole[:, r + 1] = parts[2].reshape(g, d, *rest)
    return whole.reshape(-1, *rest)


def _rows(config: ModelConfig) -> tuple[slice, slice, slice]:
    """Where q, k and v lie in a tensor that holds them one after the other."""
    q, kv = config.q_size, config.num_kv_heads * config.head_dim
    return slice(0, q), slice(q, q + kv), slice(q + kv, q + 2 * kv)
