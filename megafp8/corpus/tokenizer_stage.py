"""The tokenizer of a corpus: the one that the configuration names, or one trained here and reused while it fits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from megafp8.core.config import to_dict
from megafp8.core.errors import DataError
from megafp8.core.jsonio import write_atomic, write_json
from megafp8.core.log import event, get_logger
from megafp8.corpus.config import CorpusConfig, SourceConfig
from megafp8.corpus.folder import (
    MANIFEST,
    TOKENIZER,
    TOKENIZER_INFO,
    changed_input,
    claim,
    fingerprint,
    inputs_record,
    locked,
    record_at,
)
from megafp8.corpus.progress import Progress
from megafp8.corpus.readers import FileSource, Source
from megafp8.corpus.stdlib_docs import StdlibSource
from megafp8.corpus.train_tokenizer import draw_sample, train, train_documents
from megafp8.data.tokenizer import identity, load_tokenizer

_log = get_logger(__name__)
_KIND = "megafp8-tokenizer"


def open_source(config: SourceConfig) -> Source:
    """The source of the configured kind; inputs are found, none is read.

    Raises:
        DataError: no input.
    """
    return StdlibSource(config) if config.kind == "python_stdlib" else FileSource(config)


def source_values(config: CorpusConfig) -> dict[str, Any]:
    """What decides which documents there are and in which split: not the limit of bad ones, which only judges."""
    source = to_dict(config.source)
    for judging in ("max_bad_share", "keep_damaged_files"):
        del source[judging]
    for later in ("valid_files", "languages"):  # keys that came later change no fingerprint where they are not used
        if not source[later]:
            del source[later]
    return {"source": source, "split": to_dict(config.split)}


def _fingerprint(config: CorpusConfig) -> str:
    return fingerprint({**source_values(config), "tokenizer": to_dict(config.tokenizer)})


def is_trained(config: CorpusConfig, source: Source, folder: Path) -> bool:
    """True if the folder holds the tokenizer that training would give."""
    info, model = record_at(folder / TOKENIZER_INFO), folder / TOKENIZER
    return (
        info.get("kind") == _KIND
        and info["config_fingerprint"] == _fingerprint(config)
        and model.is_file()
        and hashlib.sha256(model.read_bytes()).hexdigest() == info["tokenizer"]["fingerprint"]
        and not changed_input(info["inputs"], source.files)
    )


def ensure_tokenizer(config: CorpusConfig, source: Source, folder: Path) -> str:
    """The spec of the corpus's tokenizer, for `load_tokenizer`; trains it if need be.

    Raises:
        DataError: the text is too little for the vocabulary.
    """
    if config.tokenizer.path:
        return config.tokenizer.path
    model = folder / TOKENIZER
    if is_trained(config, source, folder):
        event(_log, "tokenizer is there already", path=model)
        return str(model)
    with Progress("reading text for the tokenizer", sum(file.num_bytes for file in source.files)) as progress:
        documents = train_documents(source, config, progress)
        sample = draw_sample(documents, max_bytes=config.tokenizer.train_bytes, seed=config.split.seed)
    if not sample.texts:
        raise DataError("no documents to train a tokenizer on: every record is bad, empty or in the validation split")
    with Progress(f"training a tokenizer of {config.tokenizer.vocab_size} ids"):
        data = train(sample.texts, config.tokenizer)
    (folder / TOKENIZER_INFO).unlink(missing_ok=True)
    write_atomic(model, data)
    write_json(
        folder / TOKENIZER_INFO,
        {
            "kind": _KIND,
            "config_fingerprint": _fingerprint(config),
            "inputs": inputs_record(source.files, source.checksums),
            "settings": to_dict(config.tokenizer),
            "tokenizer": identity(load_tokenizer(model)),
            "train_documents": sample.num_documents,
            "train_bytes": sample.num_bytes,
            "sample_documents": len(sample.texts),
            "sample_bytes": sum(len(text.encode("utf-8")) for text in sample.texts),
        },
    )
    return str(model)


def train_into(config: CorpusConfig, folder: Path) -> str:
    """Train a tokenizer alone, into a folder that is empty or ours; returns its path.

    Raises:
        DataError: as `ensure_tokenizer`; the folder holds someone else's files, or a dataset of another tokenizer.
        ResourceError: the folder is in use, the disk full.
    """
    source = open_source(config.source)
    with locked(folder):
        claim(folder)
        if record_at(folder / MANIFEST) and not is_trained(config, source, folder):
            raise DataError(
                f"{folder}: holds a dataset written with another tokenizer; choose another folder, or run "
                "`megafp8 preprocess`, which makes both again"
            )
        return ensure_tokenizer(config, source, folder)
