"""The data section of a run's configuration. No torch here, so that `megafp8 check` stays light."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megafp8.core.config import config_dataclass


@config_dataclass
class DatasetConfig:
    """One tokenized dataset in a blend."""

    path: Annotated[str, Field(min_length=1, description="path prefix: PATH.bin and PATH.idx")]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False, description="share in the blend, relative")] = 1.0
    name: Annotated[str, Field(description="what evaluation calls it; empty: the last part of the path")] = ""


@config_dataclass
class DataConfig:
    """What is read, and how it becomes samples."""

    train: Annotated[tuple[DatasetConfig, ...], Field(min_length=1, description="datasets to train on, blended")]
    tokenizer: Annotated[str, Field(min_length=1, description='.model, tokenizer.json, its folder, or "bytes"')]
    sequence_length: Annotated[int, Field(gt=0, description="tokens in a sample")]
    valid: Annotated[tuple[DatasetConfig, ...], Field(description="datasets to evaluate on, each by itself")] = ()
    document_mask: Annotated[
        bool, Field(description="attention stays inside a document, positions restart at each")
    ] = False
    allow_changed_corpus: Annotated[
        bool, Field(description="go on though the training files are others than the checkpoint was trained on")
    ] = False
    mask_eod_loss: Annotated[
        bool, Field(description="no loss on targets that lie in the next document (input is the end-of-document id)")
    ] = False

    def __post_init__(self) -> None:
        names = [dataset_name(dataset) for dataset in self.valid]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"valid: the name {twice[0]!r} is used twice; give each dataset a name of its own")


def dataset_name(dataset: DatasetConfig) -> str:
    """What evaluation calls the dataset."""
    return dataset.name or dataset.path.rstrip("/").rpartition("/")[2]
