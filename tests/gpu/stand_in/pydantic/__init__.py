"""Stands in for pydantic where a GPU machine has PyTorch but not pydantic, and no network to get it.

Builds the configuration that pydantic would build from values that are right; of wrong ones it notices unknown keys,
missing values and words that are not among the choices, no more. tests/gpu alone puts it on the path, and says so.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ConfigDict = dict


class ValidationError(ValueError):
    """Wrong values; one problem at a time."""

    def errors(self) -> list[dict[str, Any]]:
        """As pydantic's: where, what kind, what it says."""
        return [{"loc": (), "type": "value_error", "msg": str(self), "input": None}]


def Field(*, default: Any = MISSING, default_factory: Any = MISSING, **rules: Any) -> Any:
    """A dataclass field with that default, or, within Annotated, rules that nobody reads."""
    if default_factory is not MISSING:
        return field(default_factory=default_factory)
    return rules if default is MISSING else field(default=default)


def model_validator(*, mode: str) -> Callable[[Any], Any]:
    """Mark a classmethod that changes the values before they are read."""
    assert mode == "before", mode

    def mark(method: Any) -> Any:
        method.__func__.changes_values = True
        return method

    return mark


class TypeAdapter:
    """Reads plain values as `cls`."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def validate_python(self, values: Any) -> Any:
        """The values as an object of the class."""
        try:
            return convert(self._cls, values)
        except (TypeError, ValueError) as error:
            raise ValidationError(str(error)) from error


def convert(kind: Any, value: Any) -> Any:
    """`value` as a value of the annotation `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return convert(args[0], value)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{value!r} is not one of {', '.join(map(repr, args))}")
        return value
    if origin in (Union, types.UnionType):
        return value if value is None else convert(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(convert(k, v) for k, v in zip(kinds, value, strict=True))
    if origin is list:
        return [convert(args[0], v) for v in value]
    if is_dataclass(kind) and isinstance(value, Mapping):
        return kind(**value)
    return float(value) if kind is float and isinstance(value, int) else value
