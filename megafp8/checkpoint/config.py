"""CheckpointConfig: when a run saves and what it keeps. No torch here, so that a dry run stays light."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megafp8.core.config import config_dataclass


@config_dataclass
class CheckpointConfig:
    """When a run saves and what it keeps."""

    interval: Annotated[int, Field(ge=0, description="steps between saves; 0 = only at the end and on a signal")] = 1000
    keep_last: Annotated[int, Field(ge=1, description="newest complete checkpoints to keep")] = 2
    keep_every: Annotated[
        int, Field(ge=0, description="also keep checkpoints whose step is a multiple of this for ever; 0 = none")
    ] = 0
    change_precision: Annotated[
        bool, Field(description="go on though [precision] or the moments' dtypes are others than the run began with")
    ] = False
