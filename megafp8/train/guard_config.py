"""[guard]: what a run does about faults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megafp8.core.config import config_dataclass


@config_dataclass
class GuardSection:
    """What a run watches for, and what it does then."""

    stop_signals: Annotated[
        tuple[Literal["SIGTERM", "SIGUSR1", "SIGINT"], ...],
        Field(description="signals at which it saves and stops; what is not listed ends it at once"),
    ] = ("SIGTERM", "SIGUSR1", "SIGINT")
    setup_timeout_seconds: Annotated[
        int, Field(gt=0, description="for start and first step, with its compilation, before a rank counts as hung")
    ] = 1800
    save_timeout_seconds: Annotated[int, Field(gt=0, description="the same for a checkpoint")] = 1800
