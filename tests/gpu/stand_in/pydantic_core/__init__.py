"""Stands in for pydantic_core: see stand_in/pydantic."""


class ArgsKwargs:
    """What pydantic hands to a validator at a direct construction; the stand-in hands a dict."""

    kwargs: dict[str, object]
