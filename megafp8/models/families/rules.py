"""What a family is made of: defaults, presets, and rules that map its Hugging Face names to ours.

A rule names one of our tensors and the foreign tensors that it is made of; how they are joined (`kind`) is in
`models/names`, so that both directions come from one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# copy: same tensor. conv1d: transposed (GPT-2 stores [in, out]). stack: foreign tensors stacked along a new dim 0;
# stack_pairs: along two new dims, the second of size 2 (gate and up of each expert).
# qkv: separate q, k, v interleaved by group. conv1d_qkv / joint_qkv: one foreign tensor holding q, k, v in a row.
Kind = Literal["copy", "conv1d", "stack", "stack_pairs", "qkv", "conv1d_qkv", "joint_qkv"]


@dataclass(frozen=True)
class Rule:
    """`ours` <- `theirs`, both with `{i}` for the layer's number where they belong to a layer.

    With `{e}` in them, `theirs` are those of every expert, one expert after the other.
    """

    ours: str
    theirs: tuple[str, ...]
    kind: Kind = "copy"


@dataclass(frozen=True)
class Family:
    """A family's defaults over ModelConfig's own, its presets, and its foreign names.

    Attributes:
        rules: every tensor a model of the family can have; a model uses those that its config asks for.
        to_config: our model section (dict) -> Hugging Face's config.json (dict).
        from_config: Hugging Face's config.json (dict) -> our model section (dict).
        problems: what of our model section (dict, filled in) Hugging Face's class cannot express, each as
            "<what>: it has <what the class has>".
    """

    name: str
    model_type: str
    defaults: Mapping[str, Any]
    presets: Mapping[str, Mapping[str, Any]]
    rules: tuple[Rule, ...]
    to_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    from_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    problems: Callable[[Mapping[str, Any]], list[str]]
