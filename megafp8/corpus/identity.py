"""What decides the bytes of a corpus: its configuration without what only judges, places or hurries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megafp8.core.config import to_dict
from megafp8.corpus.config import CorpusConfig, SourceConfig
from megafp8.corpus.mapping import step_values
from megafp8.corpus.readers import FileSource, Source
from megafp8.corpus.stdlib_docs import StdlibSource

PIPELINE_VERSION = 4  # raise it when the same configuration and text give other bytes


def open_source(config: SourceConfig) -> Source:
    """The source of the configured kind; inputs are found, none is read.

    Raises:
        DataError: no input.
    """
    return StdlibSource(config) if config.kind == "python_stdlib" else FileSource(config)


def fingerprint(values: Mapping[str, Any]) -> str:
    """sha256 of a configuration as canonical JSON."""
    text = json.dumps({"pipeline": PIPELINE_VERSION, **values}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def source_values(config: CorpusConfig) -> dict[str, Any]:
    """What decides which documents there are and in which split: not the limit of bad ones, which only judges."""
    source = to_dict(config.source)
    for judging in ("on_error", "max_bad_share", "keep_damaged_files"):
        del source[judging]
    if config.source.kind != "source_tree":
        del source["suffixes"]
    for later in ("valid_files", "languages", "metadata_keys"):  # later keys change no fingerprint where not used
        if not source[later]:
            del source[later]
    values = {"source": source, "split": to_dict(config.split)}
    return values | ({"steps": [step_values(table) for table in config.steps]} if config.steps else {})


def tokenizer_values(config: CorpusConfig) -> dict[str, Any]:
    """What decides a trained tokenizer, or which one is used: not what its text may lose, which only judges."""
    values = to_dict(config.tokenizer)
    del values["max_lossy_share"]
    return values


def training_values(config: CorpusConfig) -> dict[str, Any]:
    """What of it decides a model that is trained: not how documents are marked, which is for any tokenizer."""
    values = tokenizer_values(config)
    return {name: value for name, value in values.items() if name not in ("path", "add_bos", "append_eos")}


def tokenizer_fingerprint(config: CorpusConfig) -> str:
    """Of all that decides a trained tokenizer, but for the inputs."""
    return fingerprint({**source_values(config), "tokenizer": training_values(config)})


def corpus_fingerprint(config: CorpusConfig, named_tokenizer: str) -> str:
    """Of all that decides the corpus, but for the inputs; `named_tokenizer`: fingerprint of `tokenizer.path`, or ""."""
    more: dict[str, Any] = {"tokenizer_file": named_tokenizer} if named_tokenizer else {}
    more |= {"shuffle_seed": config.output.shuffle_seed} if config.output.shuffle else {}
    return fingerprint({**source_values(config), "tokenizer": tokenizer_values(config), **more})
