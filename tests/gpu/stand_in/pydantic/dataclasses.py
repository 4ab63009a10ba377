"""`pydantic.dataclasses.dataclass`, see the package."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

from pydantic import convert


def dataclass(*, frozen: bool, config: Any) -> Callable[[type], type]:
    """A standard dataclass whose constructor turns mappings into sections."""

    def decorate(cls: type) -> type:
        made = dataclasses.dataclass(frozen=frozen)(cls)
        plain_init = made.__init__  # type: ignore[misc]
        names = [field.name for field in dataclasses.fields(made)]
        changes = [name for name, value in vars(cls).items() if _changes_values(value)]

        @functools.wraps(plain_init)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            values = dict(zip(names, args)) | kwargs
            for name in changes:
                values = getattr(made, name)(values)
            unknown = [name for name in values if name not in names]
            if unknown:
                raise ValueError(f"{cls.__name__}: unknown key {', '.join(unknown)}")
            hints = typing.get_type_hints(made, include_extras=True)
            plain_init(self, **{name: convert(hints[name], value) for name, value in values.items()})

        made.__init__ = init  # type: ignore[misc]
        return made

    return decorate


def _changes_values(value: Any) -> bool:
    return isinstance(value, classmethod) and getattr(value.__func__, "changes_values", False)
