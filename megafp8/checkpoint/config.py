"""CheckpointConfig: when a run saves and what it keeps. No torch here, so that a dry run stays light."""

from __future__ import annotations

from typing import Annotated, Literal

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
    asynchronous: Annotated[
        bool,
        Field(description="save from a copy in host memory, by a process beside each rank, while training goes on"),
    ] = False
    write_threads: Annotated[int, Field(ge=1, le=64, description="files that a rank writes at once")] = 2
    max_failed_saves: Annotated[
        int, Field(ge=0, description="saves in a row that may fail before the run stops; the last one may not")
    ] = 0
    local_folder: Annotated[
        str, Field(description="a folder on each node's own disk for fast checkpoints between durable ones")
    ] = ""
    local_interval: Annotated[int, Field(ge=0, description="steps between local checkpoints; 0 = none")] = 0
    change_precision: Annotated[
        bool, Field(description="go on though [precision] or the moments' dtypes are others than the run began with")
    ] = False
    load_from: Annotated[
        str,
        Field(
            description="a checkpoint, a run's folder or a Hugging Face folder that a new run begins from; empty = no"
        ),
    ] = ""
    load_what: Annotated[
        Literal["weights", "optimizer", "run"],
        Field(description="of load_from: the weights; and the optimizer's moments; or all, to go on at its step"),
    ] = "weights"
    load_only: Annotated[
        tuple[str, ...],
        Field(description='patterns (*, ?, [...]) of parameters that are taken, e.g. "layers.*"; [] = all'),
    ] = ()
    change_model: Annotated[
        bool, Field(description="take weights of load_from though tokenizer or rope, norm and routing keys are others")
    ] = False

    def __post_init__(self) -> None:
        if bool(self.local_folder) != bool(self.local_interval):
            raise ValueError(
                "local_folder and local_interval go together: local_folder = "
                f"{self.local_folder!r}, local_interval = {self.local_interval}; give both or none"
            )
        if not self.load_from and (self.load_only or self.load_what != "weights"):
            raise ValueError("load_what and load_only are of load_from, which is empty; name a checkpoint there")
        if self.load_only and self.load_what != "weights":
            raise ValueError(
                f'load_only with load_what = "{self.load_what}": moments and position are of a whole model; '
                'nearest: load_what = "weights"'
            )
