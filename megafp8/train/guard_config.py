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
    spike_factor: Annotated[
        float,
        Field(
            ge=0,
            description="a loss above the median of the last ones by so many times their spread (1.48 median "
            "absolute deviations) is a spike; 0 = not looked for",
        ),
    ] = 0.0
    spike_window: Annotated[
        int, Field(ge=4, description="losses that make that median; looked for from half of them on")
    ] = 50
    spike_action: Annotated[
        Literal["report", "skip", "rewind", "stop"],
        Field(
            description="what becomes of the step: taken and reported; not taken; undone back to the newest "
            "checkpoint, its samples and those before left out; or the run ends with code 5"
        ),
    ] = "skip"
    spike_skip_steps: Annotated[
        int, Field(gt=0, description="rewind: of so many steps, up to the spike, the samples are left out")
    ] = 10
    max_spikes: Annotated[int, Field(ge=0, description="in a row that may be skipped")] = 5
    max_rewinds: Annotated[int, Field(ge=0, description="in a run")] = 3
    rerun_suspicious: Annotated[
        bool,
        Field(
            description="compute the step of a spike again, and one that was not finite and is when looked into: "
            "another result is a fault of the hardware, and not taken"
        ),
    ] = False
    rerun_interval: Annotated[
        int, Field(ge=0, description="steps between steps that are computed twice and compared; 0 = never")
    ] = 0
