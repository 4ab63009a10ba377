"""`megafp8 preprocess`: source -> tokenizer -> train and valid token files, quarantine, manifest.

Called again it does nothing if all is done, and goes on after an interruption at the last snapshot: the journal holds
how many batches are in the partial files and how long these were, and batches are the same on every pass. Any end
of an interrupted run has the bytes of an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.core.config import to_dict
from megafp8.core.errors import ConfigError, DataError, MegaError
from megafp8.core.jsonio import resource_error, write_json
from megafp8.core.log import event, get_logger
from megafp8.corpus import folder as places
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.documents import Bad
from megafp8.corpus.progress import Progress
from megafp8.corpus.readers import Source
from megafp8.corpus.tokenize import Job, batches, encode_all, skip
from megafp8.corpus.tokenizer_stage import ensure_tokenizer, open_source, source_values
from megafp8.corpus.totals import Totals
from megafp8.data.indexed import optimal_dtype
from megafp8.data.indexed_writer import IndexedDatasetWriter
from megafp8.data.tokenizer import Tokenizer, identity, load_tokenizer

_log = get_logger(__name__)
_SNAPSHOT_SECONDS = 20.0  # of work that a kill can cost; a snapshot waits for the disk


@dataclass(frozen=True)
class Result:
    """What `preprocess` left: the manifest, and whether it had to do anything."""

    folder: Path
    manifest: dict[str, Any]
    was_done: bool


def preprocess(config: CorpusConfig, *, snapshot_seconds: float = _SNAPSHOT_SECONDS) -> Result:
    """Make the corpus in `config.output.folder`, or what is left of it to be made.

    Raises:
        DataError: no input, no documents, too many bad ones, damaged files, text too little for the vocabulary, or a
            folder with files of someone else.
        ResourceError: disk full, no permission, folder in use, a worker that died.
    """
    if config.steps:
        raise ConfigError("steps: they are checked, but not run yet; remove them")
    source = open_source(config.source)
    folder = Path(config.output.folder)
    with places.locked(folder):
        places.claim(folder)
        run = _Run(config, source, folder, snapshot_seconds)
        if manifest := run.finished():
            event(_log, "already done: same configuration and inputs, nothing to do", folder=folder)
            return Result(folder, manifest, True)
        try:
            return Result(folder, run.make(), False)
        except MegaError:
            if not run.has_snapshot:  # what could be continued stays, what could not is no use to anybody
                places.clear_partial(folder)
                if not (folder / places.QUARANTINE).exists():
                    (folder / places.JOURNAL).unlink(missing_ok=True)
            raise


@dataclass
class _Run:
    """One call of `preprocess` on a folder that is ours."""

    config: CorpusConfig
    source: Source
    folder: Path
    snapshot_seconds: float
    has_snapshot: bool = False
    totals: Totals = field(default_factory=Totals)
    batches_done: int = 0

    @cached_property
    def fingerprint(self) -> str:
        """Of all that decides the bytes of the output, but for the inputs."""
        path = self.config.tokenizer.path
        named = {"tokenizer_file": load_tokenizer(path).fingerprint} if path else {}
        return places.fingerprint({**source_values(self.config), "tokenizer": to_dict(self.config.tokenizer), **named})

    def finished(self) -> dict[str, Any]:
        """The manifest if it is of this configuration and these inputs, and its outputs are there; else {}."""
        manifest = places.record_at(self.folder / places.MANIFEST)
        if not manifest:
            return {}
        reason = self._difference(manifest)
        if not reason and (name := places.missing_output(self.folder, manifest["outputs"])):
            reason = f"{name} is missing or has another size"
        if not reason:
            self.totals = Totals.from_json(manifest["counts"], {})
            self._judge()
            return manifest
        event(_log, "making the corpus again", because=reason)
        return {}

    def _difference(self, record: dict[str, Any]) -> str:
        if record["config_fingerprint"] != self.fingerprint:
            return "the configuration has changed"
        return places.changed_input(record["inputs"], self.source.files)

    def make(self) -> dict[str, Any]:
        """Everything that `finished` did not find."""
        journal = places.record_at(self.folder / places.JOURNAL)
        if not journal or self._difference(journal):
            journal = {}
            self._write_journal(None)  # first: from here on the folder is known to be ours
            places.clear(self.folder)
        spec = ensure_tokenizer(self.config, self.source, self.folder)
        tokenizer = load_tokenizer(spec)
        dtype = optimal_dtype(tokenizer.vocab_size)
        writers = self._writers(dtype, journal.get("progress"))
        try:
            with contextlib.ExitStack() as stack:
                # an error aborts both; commit is called by hand, after the verdict
                for writer in writers.values():
                    stack.callback(writer.abort)
                job = Job(spec, tokenizer.fingerprint, dtype.name, self.config.source, self.config.split)
                self._tokenize(job, writers)
                self._verdict()
                return self._commit(writers, tokenizer)
        except OSError as error:
            raise resource_error(error, self.folder) from error

    def _writers(self, dtype: np.dtype, progress: dict[str, Any] | None) -> dict[str, IndexedDatasetWriter]:
        """Writers at the journal's snapshot, or at the beginning if there is none that can be used."""
        quarantine = places.partial_quarantine(self.folder)
        if progress:
            try:
                states = progress["writers"]
                writers = {s: IndexedDatasetWriter(self.folder / s, dtype, state=states[s]) for s in places.SPLITS}
                os.truncate(quarantine, progress["quarantine_bytes"])
                self.totals = Totals.from_json(progress["counts"], progress["ids"])
                self.batches_done = progress["batches"]
                self.has_snapshot = True
                event(_log, "going on after an interruption", documents=self.totals.num_documents)
                return writers
            except (MegaError, OSError):  # killed while the finished files got their names
                event(_log, "an interrupted run cannot be continued, starting it again", folder=self.folder)
        places.clear_partial(self.folder)
        quarantine.write_bytes(b"")
        return {s: IndexedDatasetWriter(self.folder / s, dtype) for s in places.SPLITS}

    def _tokenize(self, job: Job, writers: dict[str, IndexedDatasetWriter]) -> None:
        workers = self.config.output.workers or os.cpu_count() or 1
        work = skip(batches(self.source.records()), self.batches_done)
        total = sum(file.num_bytes for file in self.source.files)
        last = time.monotonic()
        with Progress("tokenizing", total) as progress, open(places.partial_quarantine(self.folder), "ab") as bad:
            progress.begin(**self.totals.shown())
            for encoded in encode_all(job, work, workers):
                for split, part in encoded.parts.items():
                    writers[split].add_documents(part.ids, part.lengths)
                bad.writelines(_bad_line(one) for one in encoded.bad)
                self.totals.add(encoded)
                self.batches_done += 1
                progress.update(self.source.position, **self.totals.shown())
                if time.monotonic() - last >= self.snapshot_seconds:
                    self._snapshot(writers, bad)
                    last = time.monotonic()
            bad.flush()
            os.fsync(bad.fileno())

    def _snapshot(self, writers: dict[str, IndexedDatasetWriter], bad: Any) -> None:
        states = {split: writer.snapshot() for split, writer in writers.items()}
        bad.flush()
        os.fsync(bad.fileno())
        self._write_journal(
            {
                "batches": self.batches_done,
                "writers": states,
                "quarantine_bytes": bad.tell(),
                "counts": self.totals.to_json(),
                "ids": self.totals.ids_to_json(),
            }
        )
        self.has_snapshot = True

    def _write_journal(self, progress: dict[str, Any] | None) -> None:
        write_json(
            self.folder / places.JOURNAL,
            {
                "kind": "megafp8-preprocess-journal",
                "config_fingerprint": self.fingerprint,
                "inputs": places.inputs_record(self.source.files, {}),
                "progress": progress,
            },
        )

    def _verdict(self) -> None:
        """Refuse a corpus with too many bad records; the quarantine file stays as the evidence."""
        try:
            self._judge()
        except DataError:
            if self.totals.num_bad:
                shutil.copyfile(places.partial_quarantine(self.folder), self.folder / places.QUARANTINE)
            raise

    def _judge(self) -> None:
        self.totals.judge(self.config, self.folder / places.QUARANTINE)

    def _commit(self, writers: dict[str, IndexedDatasetWriter], tokenizer: Tokenizer) -> dict[str, Any]:
        """Names for everything, the manifest last."""
        with Progress("writing indexes and checksums"):
            for split, writer in writers.items():
                summary = self.totals.split_summary(split)
                del summary["documents"], summary["tokens"]  # the writer says these itself
                writer.metadata = {"tokenizer": identity(tokenizer), **summary}
                writer.commit()
        os.replace(places.partial_quarantine(self.folder), self.folder / places.QUARANTINE)
        manifest = self._manifest(tokenizer)
        write_json(self.folder / places.MANIFEST, manifest)
        (self.folder / places.JOURNAL).unlink(missing_ok=True)
        places.clear_partial(self.folder)
        return manifest

    def _manifest(self, tokenizer: Tokenizer) -> dict[str, Any]:
        names = [f"{split}.{suffix}" for split in places.SPLITS for suffix in ("bin", "idx", "json")]
        names += [places.QUARANTINE] + ([] if self.config.tokenizer.path else [places.TOKENIZER])
        config = to_dict(self.config)
        del config["output"]["workers"]  # no byte depends on it
        train = self.totals.split_summary("train")
        return {
            "kind": "megafp8-corpus",
            "pipeline_version": places.PIPELINE_VERSION,
            "config": config,
            "config_fingerprint": self.fingerprint,
            "inputs": places.inputs_record(self.source.files, self.source.checksums),
            "outputs": {name: (self.folder / name).stat().st_size for name in names},
            "tokenizer": identity(tokenizer),
            "unigram_entropy_nats": train["unigram_entropy_nats"],
            "bytes_per_token": train["bytes_per_token"],
            "counts": self.totals.to_json(),
        }


def _bad_line(bad: Bad) -> bytes:
    return (json.dumps(dataclasses.asdict(bad), ensure_ascii=False) + "\n").encode()
