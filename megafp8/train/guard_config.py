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
    replica_interval: Annotated[
        int,
        Field(
            ge=0,
            description="steps between comparisons of replicas' weights and optimizer state, bit for bit, also "
            "done before each save; 0 = never",
        ),
    ] = 0
    straggler_interval: Annotated[
        int, Field(ge=0, description="steps between comparisons of the ranks' own time of work; 0 = never")
    ] = 5
    straggler_ratio: Annotated[
        float, Field(gt=1, description="times the median of the other ranks, from which one counts as slow")
    ] = 2.0
