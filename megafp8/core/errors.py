"""The errors a user can cause, each with its exit code.

What a programmer can cause is an `assert`. A message is one line: the value, the rule, the way out.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_CORRUPT = 17  # Megatron-LM's code of a result that failed its validation
EXIT_HUNG = 70
EXIT_PEER_LOST = 71
EXIT_NO_PROGRESS = 72
EXIT_PREEMPTED = 75  # BSD's EX_TEMPFAIL: saved, run the same command again
EXIT_STOP_FILE = 76
EXIT_INTERRUPTED = 130  # 128 + SIGINT, by shell convention

EXIT_CODES: dict[int, str] = {
    EXIT_OK: "done",
    EXIT_INTERNAL: "internal error (a bug; --debug shows the traceback)",
    2: "configuration: wrong key, value or combination",
    3: "data: corpus, tokenizer or dataset missing, broken or not matching",
    4: "checkpoint: missing, broken or not matching",
    5: "numerics: losses that are not finite or jump, beyond the limit",
    6: "resource: disk full, no memory, no permission, no connection, folder in use by another process",
    EXIT_CORRUPT: "silent corruption: replicas or repeated results differ; nothing was saved after it",
    EXIT_HUNG: "hung: a rank made no progress for its time-out; every rank's stack is in <run>/hangs",
    EXIT_PEER_LOST: "another rank ended, see that one's exit code",
    EXIT_NO_PROGRESS: "no progress: starts in a row ended without a new step or checkpoint",
    EXIT_PREEMPTED: "preempted: a checkpoint was saved, run the same command again to go on",
    EXIT_STOP_FILE: "stopped by the file <run>/STOP: a checkpoint was saved; remove the file to go on",
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
    """Losses or gradients that are not finite, or jump, beyond the configured limit."""

    exit_code = 5


class CorruptionError(MegaError):
    """Values that must be equal are not: memory, a chip or a link has changed bits without a word."""

    exit_code = EXIT_CORRUPT


class NoProgressError(MegaError):
    """Starts in a row that ended without a new step."""

    exit_code = EXIT_NO_PROGRESS


class ResourceError(MegaError):
    """The machine refuses: disk full, no memory, no permission, no connection, a folder in use by another process."""

    exit_code = 6


def one_line(error: BaseException) -> str:
    """The first line of an error's message that says anything, cut at 200 characters; else the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def is_fault(error: BaseException) -> bool:
    """Whether something went wrong, rather than somebody asked the process to end.

    Panics of packages written in Rust (tokenizers, rensa) are no `Exception`, but a class of their own.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
