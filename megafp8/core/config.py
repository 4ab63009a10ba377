"""Configuration: frozen dataclasses <- TOML <- dotted overrides.

Validation is pydantic's; what is ours is the shape of the message: every broken rule at once, one line each,
with the value, the rule and, for an unknown key, the nearest name. Sections live beside the code they steer.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import dataclass_transform  # typing's own needs Python 3.11

from megafp8.core.errors import ConfigError
from megafp8.core.log import redact

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def config_dataclass(cls: type[T]) -> type[T]:
    """A frozen, validated dataclass; unknown keys are refused, ints are not cut from floats."""
    return pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)  # type: ignore[return-value]


def nearest(name: str, names: Iterable[str]) -> str:
    """The likeliest intended name, as `; nearest: x`, or the empty string if none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; nearest: {close[0]}" if close else ""


def load_toml(path: Path | str) -> dict[str, Any]:
    """Read a TOML file into nested dicts.

    Raises:
        ConfigError: missing, unreadable or not TOML (with line and column).
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a TOML file (examples/ has some)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise ConfigError(f"{path}: not TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: not TOML that can be read: it is nested too deeply") from None


def parse_value(text: str) -> Any:
    """The value of an override: TOML if it parses as TOML, else the bare string (`--run.name tiny`)."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `values` with `["--train.steps", "200", "--run.name=x"]` laid over it.

    Raises:
        ConfigError: an override without a value, or not of the form --section.key.
    """
    result = _deep_copy(values)
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise ConfigError(f"{word!r} is not an override; write --section.key value, e.g. --train.steps 200")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not words:
                raise ConfigError(f"--{key} has no value; write --{key} VALUE")
            text = words.pop(0)
        _set_dotted(result, key.replace("-", "_"), parse_value(text))
    return result


def _deep_copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _deep_copy(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def _set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--{key}: {parent} is a value, not a section")
    values[last] = value


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make a configuration of `cls`, all broken rules in one error, a line each.

    Raises:
        ConfigError: unknown keys (with the nearest name), wrong types, values out of range, broken rules; a value that
            looks like an access token or holds a password, for configurations are kept beside what they made.
    """
    secret = [f"{key}: looks like an access token, or a URL with a password, and would be kept in files; give it by "
              "the environment" for key, text in _texts(values) if redact(text) != text]  # fmt: skip
    if secret:
        raise ConfigError("\n".join(secret))
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        lines = [line for problem in error.errors() for line in _lines(cls, problem)]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _texts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and text of every string below."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(part, f"{place}.{key}" if place else str(key))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part, place)


def _lines(cls: type, problem: Any) -> list[str]:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return [f"{place}: unknown key{nearest(str(problem['loc'][-1]), known_keys(cls, problem['loc'][:-1]))}"]
    if problem["type"] == "missing":
        return [f"{place}: missing; it has no default"]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":  # our own rules already name the values, and there may be several
        return [f"{place}: {line}" if place else line for line in message.splitlines()]
    near = ""
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        near = nearest(problem["input"], re.findall(r"'([^']*)'", problem["ctx"]["expected"]))
    return [f"{place}: {problem['input']!r} is refused: {message[:1].lower()}{message[1:]}{near}"]


def known_keys(cls: Any, location: Sequence[Any]) -> list[str]:
    """The field names of the section at `location`, for nearest-name hints."""
    for part in location:
        if isinstance(part, int):
            args = getattr(cls, "__args__", ())
            cls = args[0] if args else cls
            continue
        types = {f.name: f.type for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
        cls = _resolve(cls, part) if part in types else cls
        if get_origin(cls) in (list, tuple):
            cls = cls.__args__[0]
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _resolve(cls: Any, field: str) -> Any:
    return cls.__pydantic_fields__[field].annotation


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as nested plain dicts, lists and values; `build(cls, to_dict(c)) == c`."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def dump_toml(config: Any, *, comments: bool = False) -> str:
    """The configuration as TOML that `load_toml` + `build` turn back into an equal one.

    With `comments`, fields that differ from their default carry `# default: ...`.
    """
    values = config if isinstance(config, Mapping) else to_dict(config)
    defaults = diff_from_defaults(config) if comments and dataclasses.is_dataclass(config) else {}
    return "\n".join(_table(values, "", defaults)).strip() + "\n"


def _table(values: Mapping[str, Any], prefix: str, changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    lines: list[str] = []
    for key, value in values.items():
        if not isinstance(value, Mapping):
            note = f"  # default: {_toml(changed[prefix + key][0])}" if prefix + key in changed else ""
            lines.append(f"{_key(key)} = {_toml(value)}{note}")
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{prefix}{_key(key)}]", *_table(value, f"{prefix}{_key(key)}.", changed)]
    return lines


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return {"inf": "inf", "-inf": "-inf", "nan": "nan"}.get(repr(value), repr(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + " }" if value else "{}"
    return str(value) if isinstance(value, int) else json.dumps(value, ensure_ascii=False)


def diff_from_defaults(config: Any) -> dict[str, tuple[Any, Any]]:
    """`{dotted key: (default, value)}` of every field that differs; a required field's default is "(none)"."""
    changed: dict[str, tuple[Any, Any]] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            inner = diff_from_defaults(value)
            changed |= {f"{field.name}.{key}": pair for key, pair in inner.items()}
            continue
        default = _default(field)
        if _plain(default) != _plain(_as_plain(value)):
            changed[field.name] = (_plain(default), _plain(_as_plain(value)))
    return changed


def _as_plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for v in value]  # type: ignore[arg-type]
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        default = field.default
        if hasattr(default, "get_default"):  # pydantic's Field(...) as a dataclass default
            return default.get_default(call_default_factory=True)
        return default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "(none)"
