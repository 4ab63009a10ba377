"""Foreign names and ours, both directions from one table of rules (`families/*`).

Works on whole tensors by their methods; no torch import is needed. What a family's foreign class cannot express is
refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from megafp8.core.config import build, nearest, to_dict
from megafp8.core.errors import CheckpointError, ConfigError
from megafp8.models.config import ModelConfig
from megafp8.models.families import FAMILIES
from megafp8.models.families.rules import Family, Rule

Tensor = Any
VIEWS = ("copy", "stack", "stack_pairs")  # kinds of rule whose foreign tensors are contiguous parts of ours
_MAX_LISTED = 20  # names in one message
# Buffers that older exports carry; they are arithmetic, not weights.
_IGNORED_ENDINGS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")


def to_hf_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our whole tensors under Hugging Face's names and shapes; any dtype, contiguous.

    Raises:
        CheckpointError: tensors are missing or unknown, all of them listed.
    """
    rules = list(resolved_rules(config))
    check_names("the model's tensors", {rule.ours for rule in rules}, tensors)
    return {
        name: part.contiguous()
        for rule in rules
        for name, part in zip(rule.theirs, split(config, rule, tensors[rule.ours]), strict=True)
    }


def from_hf_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's tensors under our names and shapes.

    Raises:
        CheckpointError: tensors are missing or unknown, all of them listed.
    """
    rules = list(resolved_rules(config))
    check_names("the folder's tensors", foreign_names(config), {n for n in tensors if not is_ignored(config, n)})
    return {rule.ours: join(config, rule, [tensors[name] for name in rule.theirs]) for rule in rules}


def foreign_names(config: ModelConfig) -> set[str]:
    """Every Hugging Face tensor that a model of this config has."""
    return {name for rule in resolved_rules(config) for name in rule.theirs}


def is_ignored(config: ModelConfig, name: str) -> bool:
    """Whether a foreign tensor carries nothing: buffers of arithmetic, and the embedding repeated as tied output."""
    return name.endswith(_IGNORED_ENDINGS) or (config.tied_embeddings and name == "lm_head.weight")


def check_names(what: str, wanted: Collection[str], found: Collection[str]) -> None:
    """Compare two sets of tensor names.

    Raises:
        CheckpointError: they differ; lists what is missing and what is unknown.
    """
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted]
    if missing or unknown:
        hint = nearest(missing[0], unknown) if len(missing) == 1 else ""
        parts = [f"{text}: {_listed(names)}" for text, names in (("missing", missing), ("unknown", unknown)) if names]
        raise CheckpointError(f"{what} are not those of the configuration; {'; '.join(parts)}{hint}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(sorted(names)[:_MAX_LISTED]) + more


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
    if "model_type" not in config:
        raise ConfigError(f"config.json has no model_type: it is no Hugging Face model (one of: {', '.join(families)})")
    if model_type not in families:
        raise ConfigError(f"model_type {model_type!r} is not one of: {', '.join(families)}")
    try:
        return build(ModelConfig, families[model_type].from_config(config))
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"config.json of a {model_type}: {'; '.join(str(error).splitlines())}") from error


def resolved_rules(config: ModelConfig) -> Iterator[Rule]:
    """A rule for each tensor that this config has, in model order, numbers of layers and experts filled in."""
    experts = range(config.moe.num_experts)
    rules = FAMILIES[config.family].rules
    at = next(number for number, rule in enumerate(rules) if "{i}" in rule.ours)
    layers = [rule for rule in rules if "{i}" in rule.ours]
    outside = [rule for rule in rules if "{i}" not in rule.ours and _has(config, rule.ours)]
    first = sum(rule in outside for rule in rules[:at])
    yield from outside[:first]
    for i in range(config.num_layers):
        for rule in layers:
            if _has(config, rule.ours, i):
                numbers = experts if "{e}" in rule.theirs[0] else range(1)
                names = (name.format(i=i, e=e) for e in numbers for name in rule.theirs)
                yield Rule(rule.ours.format(i=i), tuple(names), rule.kind)
    yield from outside[first:]


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
        return config.has_qkv_bias if ".qkv." in name else config.attention_bias
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


def split(config: ModelConfig, rule: Rule, tensor: Tensor) -> list[Tensor]:
    """Our tensor of a resolved rule as the foreign ones, in the order of `rule.theirs`; views where it can be done."""
    match rule.kind:
        case "copy":
            return [tensor]
        case "conv1d":
            return [tensor.T]
        case "stack":
            return list(tensor)
        case "stack_pairs":
            return [matrix for pair in tensor for matrix in pair]
    parts = split_qkv(config, tensor)
    if rule.kind == "qkv":
        return parts
    whole = tensor.new_empty(tensor.shape)
    for part, rows in zip(parts, _rows(config), strict=True):
        whole[rows] = part
    return [whole.T if rule.kind == "conv1d_qkv" else whole]


def split_qkv(config: ModelConfig, tensor: Tensor) -> list[Tensor]:
    """Queries, keys and values ([heads x head_dim, ...] each) of our fused tensor, which interleaves them by group."""
    g, d = config.num_kv_heads, config.head_dim
    r = config.num_attention_heads // g
    grouped = tensor.reshape(g, r + 2, d, *tensor.shape[1:])
    return [part.reshape(-1, *tensor.shape[1:]) for part in (grouped[:, :r], grouped[:, r], grouped[:, r + 1])]


def join(config: ModelConfig, rule: Rule, parts: Sequence[Tensor]) -> Tensor:
    """The foreign tensors of a resolved rule, in the order of `rule.theirs`, as our one."""
    match rule.kind:
        case "copy":
            return parts[0]
        case "conv1d":
            return parts[0].T.contiguous()
        case "stack" | "stack_pairs":
            whole = parts[0].new_empty((len(parts), *parts[0].shape))
            for i, part in enumerate(parts):
                whole[i] = part
            return whole if rule.kind == "stack" else whole.reshape(-1, 2, *parts[0].shape)
    if rule.kind != "qkv":
        joint = parts[0].T if rule.kind == "conv1d_qkv" else parts[0]
        parts = [joint[rows] for rows in _rows(config)]
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
