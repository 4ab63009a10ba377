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
    fixed: tuple[str, ...] = ("norm", "activation", "position", "qk_norm")
    fixed += {"llama": (), "qwen3": ("mlp_bias",), "gpt": ("attention_bias", "mlp_bias")}[config.family]
    for name in fixed:
        if getattr(config, name) != family.defaults[name]:
            raise ConfigError(
                f"model.{name} = {getattr(config, name)!r} cannot be exported: Hugging Face's {family.model_type} has "
                f"{family.defaults[name]!r}"
            )
    if config.family == "gpt" and (config.q_size, config.num_kv_heads) != (
        config.hidden_size,
        config.num_attention_heads,
    ):
        raise ConfigError("model: GPT-2 has head_dim = hidden_size / num_attention_heads and no shared kv heads")
    return family.to_config(to_dict(config))


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Our config from a config.json.

    Raises:
        ConfigError: a model type that no family serves.
    """
    families: dict[str, Family] = {family.model_type: family for family in FAMILIES.values()}
    model_type = str(config.get("model_type"))
    if model_type not in families:
        raise ConfigError(f"model_type {model_type!r} is not one of: {', '.join(families)}")
    return ModelConfig(**families[model_type].from_config(config))


def _rules(config: ModelConfig) -> Iterator[Rule]:
    """The rules of the tensors that this config has, layer numbers filled in."""
    for rule in FAMILIES[config.family].rules:
        if not _has(config, rule.ours):
            continue
        if "{i}" not in rule.ours:
            yield rule
            continue
        for i in range(config.num_layers):
            yield Rule(rule.ours.format(i=i), tuple(name.format(i=i) for name in rule.theirs), rule.kind)


def _has(config: ModelConfig, name: str) -> bool:
    if name == "output.weight":
        return not config.tied_embeddings
    if ".q_norm." in name or ".k_norm." in name:
        return config.qk_norm
    if name.endswith(".bias") and "norm" not in name:
        return config.attention_bias if ".attention." in name else config.mlp_bias
    return True


def _split(config: ModelConfig, kind: Kind, tensor: Tensor) -> list[Tensor]:
    match kind:
        case "copy":
            parts = [tensor]
        case "conv1d":
            parts = [tensor.T]
        case "stack":
            parts = [tensor[0], tensor[1]]
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
        case "stack":
            whole = parts[0].new_empty((len(parts), *parts[0].shape))
            for i, part in enumerate(parts):
                whole[i] = part
            return whole
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
