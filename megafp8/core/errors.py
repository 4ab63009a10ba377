"""The errors a user can cause, each with its exit code.

What a programmer can cause is an `assert`. A message is one line: the value, the rule, the way out.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_PREEMPTED = 75  # BSD's EX_TEMPFAIL: saved, run the same command again
EXIT_INTERRUPTED = 130  # 128 + SIGINT, by shell convention

EXIT_CODES: dict[int, str] = {
    EXIT_OK: "done",
    EXIT_INTERNAL: "internal error (a bug; --debug shows the traceback)",
    2: "configuration: wrong key, value or combination",
    3: "data: corpus, tokenizer or dataset missing, broken or not matching",
    4: "checkpoint: missing, broken or not matching",
    5: "numerics: non-finite loss or gradients beyond the limit",
    6: "resource: disk full, no permission, folder in use by another process",
    EXIT_PREEMPTED: "preempted: a checkpoint was saved, run the same command again to go on",
    EXIT_INTERRUPTED: "interrupted a second time: stopped at once, the last checkpoint is intact",
}


class MegaError(Exception):
    """Base of all errors that a user can cause; `exit_code` is the process's exit status."""

    exit_code = EXIT_INTERNAL


class ConfigError(MegaError):
    """A wrong key, value or combination in a configuration or on the command line."""

    exit_code = 2


class DataError(MegaError):
    """A corpus, tokenizer or token file that is missing, broken or does not match."""

    exit_code = 3


class CheckpointError(MegaError):
    """A checkpoint that is missing, broken or does not match the run."""

    exit_code = 4


class NumericsError(MegaError):
    """Non-finite losses or gradients beyond the configured limit."""

    exit_code = 5


class ResourceError(MegaError):
    """The machine refuses: disk full, no permission, a folder in use by another process."""

    exit_code = 6
