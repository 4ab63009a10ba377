"""One rank-aware logger: an event a line, `message key=value ...`, secrets redacted.

Rank 0 speaks; another rank only about what is its own news (`all_ranks=True`).
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

_ROOT = "megafp8"
_SECRET_KEY = re.compile(r"(token|key|secret|password)$", re.IGNORECASE)
# Hugging Face, OpenAI and the like, GitHub, AWS; a URL's user:password; a query's token=...
_SECRET_VALUE = re.compile(
    r"((?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|sk-(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{20,}|gh[a-z]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16})"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
    r"|(?<=[?&])[^=&\s]*(?:token|key|secret|password|signature)=[^&\s\"']+)",
    re.IGNORECASE,
)
_state = {"rank": 0}


class _Stderr(logging.StreamHandler):
    """Writes to what sys.stderr is at that moment: a progress bar puts its own there, to keep lines above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, a child of the one `megafp8` logger."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def redact(text: str) -> str:
    """Replace what looks like an access token or a URL's credentials by `***`."""
    return _SECRET_VALUE.sub("***", text)


def set_up(*, rank: int = 0, file: Path | None = None, quiet: bool = False) -> None:
    """Attach handlers: stderr on rank 0 (unless `quiet`), `file` on the rank that passes one."""
    _state["rank"] = rank
    root = logging.getLogger(_ROOT)
    root.setLevel(logging.INFO)
    root.propagate = False
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    formatter = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%Y-%m-%d %H:%M:%S")
    stream = _Stderr()
    stream.setLevel(logging.WARNING if quiet else logging.INFO)
    handlers: list[logging.Handler] = [stream]
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)


def event(
    logger: logging.Logger, message: str, *, level: int = logging.INFO, all_ranks: bool = False, **fields: Any
) -> None:
    """Log one event. A field whose name ends in token, key, secret or password is not shown."""
    if _state["rank"] != 0 and not all_ranks:
        return
    shown = {k: "***" if _SECRET_KEY.search(k) else _text(v) for k, v in fields.items()}
    if all_ranks:
        shown["rank"] = str(_state["rank"])
    logger.log(level, redact(" ".join([message, *(f"{k}={v}" for k, v in shown.items())])))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return f'"{text}"' if " " in text else text
