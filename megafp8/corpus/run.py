"""`megafp8 preprocess`: plans the stages, runs their tasks, judges, and gives the results their names.

    split (line ends of large files) -> read (+ steps) -> for each global step: signatures -> partition -> edges
    -> links -> map (+ steps); then sample -> tokenizer -> check -> tokenize -> write -> manifest

or, where there are no steps and the tokenizer is given (`Planner.is_one_pass`), split -> check -> tokenize -> write.

Called again it does nothing if all is done; else every task that is done stays done. Any end of an interrupted run
has the bytes of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megafp8.core.config import to_dict
from megafp8.core.errors import DataError
from megafp8.core.jsonio import sealed, write_json
from megafp8.core.log import event, get_logger
from megafp8.corpus import folder as places
from megafp8.corpus import tokenizer_check
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.documents import SPLITS
from megafp8.corpus.figures import Figures
from megafp8.corpus.global_steps import deduplicate, segments
from megafp8.corpus.identity import PIPELINE_VERSION, corpus_fingerprint, open_source, tokenizer_fingerprint
from megafp8.corpus.mapping import DROPPED
from megafp8.corpus.parts import EMPTY_LINES, View
from megafp8.corpus.planning import Cuts, Planner
from megafp8.corpus.quarantine import BAD
from megafp8.corpus.rates import stage_rates
from megafp8.corpus.readers import Source
from megafp8.corpus.stage_run import StageRun, open_executor
from megafp8.corpus.stages.tokenizer import MODEL
from megafp8.corpus.tasks import Task, sweep
from megafp8.corpus.tokenizer_sample import sample, sample_facts
from megafp8.corpus.totals import Totals
from megafp8.data.indexed import remove_dataset
from megafp8.data.indexed_writer import checksum_file
from megafp8.data.tokenizer import Tokenizer, identity, load_tokenizer

_log = get_logger(__name__)
_TOKENIZER_KIND = "megafp8-tokenizer"


@dataclass(frozen=True)
class Result:
    """What `preprocess` left: the manifest, whether it had to do anything, and how fast it was (`stage_rates`)."""

    folder: Path
    manifest: dict[str, Any]
    was_done: bool
    rates: list[dict[str, Any]] = field(default_factory=list)


def preprocess(config: CorpusConfig) -> Result:
    """Make the corpus in `config.output.folder`, or what is left of it to be made.

    Raises:
        DataError: no input, no documents, too many bad ones, damaged files, text too little for the vocabulary, or a
            folder with files of someone else.
        ResourceError: disk full, no permission, folder in use, tasks that were set aside.
    """
    source = open_source(config.source)
    folder = Path(config.output.folder)
    with places.locked(folder), places.refusals(folder):
        places.claim(folder)
        places.check_outside(folder, source.files)
        if not config.output.replace:
            places.claim_corpus(folder, source.files)
        run = _Run(config, source, folder)
        if manifest := run.finished():
            event(_log, "already done: same configuration and inputs, nothing to do", folder=folder)
            return Result(folder, manifest, True)
        with run:
            return Result(folder, run.make(), False, run.rates)


def train_into(config: CorpusConfig, folder: Path) -> str:
    """Train a tokenizer alone, into a folder that is empty or ours; returns its path.

    Raises:
        DataError: as `preprocess`; the folder holds someone else's files, or a dataset of another tokenizer.
        ResourceError: the folder is in use, the disk full.
    """
    source = open_source(config.source)
    with places.locked(folder), places.refusals(folder):
        places.claim(folder)
        if is_trained(config, source, folder):
            event(_log, "tokenizer is there already", path=folder / places.TOKENIZER)
            return str(folder / places.TOKENIZER)
        if places.record_at(folder / places.MANIFEST):
            raise DataError(
                f"{folder}: holds a dataset written with another tokenizer; choose another folder, or run "
                "`megafp8 preprocess`, which makes both again"
            )
        with _Run(config, source, folder) as run:
            run.tokenizer(run.read())
        return str(folder / places.TOKENIZER)


def is_trained(config: CorpusConfig, source: Source, folder: Path) -> bool:
    """True if the folder holds the tokenizer that training would give."""
    info, model = places.record_at(folder / places.TOKENIZER_INFO), folder / places.TOKENIZER
    return (
        info.get("kind") == _TOKENIZER_KIND
        and info["config_fingerprint"] == tokenizer_fingerprint(config)
        and model.is_file()
        and hashlib.sha256(model.read_bytes()).hexdigest() == info["tokenizer"]["fingerprint"]
        and not places.changed_input(info["inputs"], source.files)
    )


@dataclass
class _Run:
    """One call of `preprocess` on a folder that is ours."""

    config: CorpusConfig
    source: Source
    folder: Path
    totals: Totals = field(default_factory=Totals)
    figures: Figures = field(default_factory=Figures)
    rates: list[dict[str, Any]] = field(default_factory=list)
    quarantine: list[Path] = field(default_factory=list)
    dropped: list[Path] = field(default_factory=list)
    checksums: dict[str, Any] = field(default_factory=dict)
    tokenizer_report: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> _Run:
        self.root = self.folder / places.STAGES
        self.planner = Planner(self.config, self.source)
        self._executor = open_executor(self.config)
        self.stages = StageRun(self.root, self._executor, stop=self.config.source.on_error == "stop")
        if not (self.folder / places.OWNER).exists():  # first: from here on the folder is known to be ours
            write_json(self.folder / places.OWNER, sealed({"kind": "megafp8-corpus-stages"}))
        places.clear_partial(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.close()

    @cached_property
    def given(self) -> Tokenizer | None:
        """The tokenizer of `tokenizer.path`, read once; None if one is to be trained."""
        return load_tokenizer(self.config.tokenizer.path) if self.config.tokenizer.path else None

    @cached_property
    def fingerprint(self) -> str:
        """Of all that decides the bytes of the output, but for the inputs."""
        return corpus_fingerprint(self.config, self.given.fingerprint if self.given else "")

    def finished(self) -> dict[str, Any]:
        """The manifest if it is of this configuration and these inputs, and its outputs are there; else {}."""
        manifest = places.record_at(self.folder / places.MANIFEST)
        if not manifest:
            return {}
        reason = self._difference(manifest)
        if not reason and (name := places.missing_output(self.folder, manifest["outputs"])):
            reason = f"{name} is missing or has another size"
        if not reason:
            self.totals = Totals.from_json(manifest["counts"])
            self.totals.judge_read(self.config, self.folder / places.QUARANTINE)
            self.totals.judge_splits(self.config)
            tokenizer_check.judge(manifest["tokenizer_report"], self.config)
            return manifest
        event(_log, "making the corpus again", because=reason)
        return {}

    def _difference(self, record: dict[str, Any]) -> str:
        if record["pipeline_version"] != PIPELINE_VERSION:
            return "it was made by another version"
        if record["config_fingerprint"] != self.fingerprint:
            return "the configuration has changed"
        return places.changed_input(record["inputs"], self.source.files)

    def make(self) -> dict[str, Any]:
        """Everything that `finished` did not find."""
        if self.given:  # before the work, not behind it
            self.planner.marks.check(self.given, self.config.tokenizer.path)
            tokenizer_check.probe(self.config.tokenizer.path, self.given, self.config.tokenizer.max_lossy_share)
        if self.given and self.planner.is_one_pass:
            tokenizer, path = self.given, self.config.tokenizer.path
            tasks = self.planner.one_pass_tasks(self.cut(), path, tokenizer)
            self.check(tasks)
            pieces = self.tokenize(tasks)
        else:
            views = self.read()
            spec, tokenizer = self.tokenizer(views)
            pieces = self.tokenize(self.planner.tokenize_tasks(views, spec, tokenizer))
        written, records = self.write(pieces, tokenizer)
        return self._commit(written, records, tokenizer)

    def cut(self) -> Cuts:
        """Where the lines of large files end."""
        cuts, split_tasks = {}, self.planner.split_tasks()
        split_records = self.stages.run("cutting large files", [t for tasks in split_tasks.values() for t in tasks])
        self.stages.stop_if_failed()
        numbered = iter(split_records)
        for path, tasks in split_tasks.items():
            found = [next(numbered) for _ in tasks]
            cuts[path] = [record["counts"] for record in found]
            self.checksums[path] = [
                [task.inputs[0].start, task.inputs[0].stop, record["inputs"][0]["checksum"]]
                for task, record in zip(tasks, found)
            ]
        return cuts

    def read(self) -> list[View]:
        """The documents that are kept, judged."""
        tasks = self.planner.read_tasks(self.cut())
        records = self.stages.run("reading", tasks)
        self._add_read(tasks, records)
        views = self.planner.views(tasks, records)
        if self.given:  # a tokenizer that is of no use is found before the global steps
            self.check(self.planner.tokenize_tasks(views, self.config.tokenizer.path, self.given))
        for segment in segments(self.config.steps)[1:]:
            views, mapped, clusters = deduplicate(self.stages, segment, views, self.config)
            self.figures.clusters |= clusters
            for task, record in mapped:
                self.totals.add_mapped(record["counts"])
                self.figures.add(record["counts"]["account"])
                self._collect(task, record)
        self._judge_read()
        return views

    def _add_read(self, tasks: Sequence[Task], records: Sequence[dict[str, Any]]) -> None:
        for task, record in zip(tasks, records):
            if record:
                self.totals.add_read(record["counts"])
                self.figures.add(record["counts"]["account"])
                self._collect(task, record)
        self._judge_read()

    def _collect(self, task: Task, record: dict[str, Any]) -> None:
        for one in record["inputs"]:  # user's files, which `read` alone has
            self.checksums.setdefault(one["path"], one["checksum"])
        for name, paths in ((BAD, self.quarantine), (DROPPED, self.dropped)):
            if name in record["outputs"]:
                paths.append(self.stages.output(task, record, name))

    def _judge_read(self) -> None:
        """Refuse a corpus with too many bad records; the quarantine file stays as the evidence."""
        try:
            self.totals.judge_read(self.config, self.folder / places.QUARANTINE)
        except DataError:
            self.stages.stop_if_failed()  # more likely the reason why there is nothing
            if self.totals.num_bad:
                places.join_files(self.quarantine, self.folder / places.QUARANTINE)
            raise

    def tokenizer(self, views: Sequence[View]) -> tuple[str, Tokenizer]:
        """The corpus's tokenizer and where to load it from; trained, and given its name in the folder, if need be."""
        if self.given:
            return self.config.tokenizer.path, self.given
        tasks, records = sample(self.stages, views, self.config)
        task = self.planner.tokenizer_task(tasks, records)
        (trained,) = self.stages.run(f"training a tokenizer of {self.config.tokenizer.vocab_size} ids", [task])
        self.stages.stop_if_failed()
        made = self.stages.output(task, trained, MODEL)
        tokenizer = load_tokenizer(made)
        name = self.folder / places.TOKENIZER
        if not (name.is_file() and name.read_bytes() == made.read_bytes()):
            places.give_name(made, name)
        write_json(
            self.folder / places.TOKENIZER_INFO,
            sealed(
                {
                    "kind": _TOKENIZER_KIND,
                    "config_fingerprint": tokenizer_fingerprint(self.config),
                    "inputs": places.inputs_record(self.source.files, self.checksums),
                    "settings": to_dict(self.config.tokenizer),
                    "tokenizer": identity(tokenizer),
                    **sample_facts(records),
                    **trained["counts"],
                }
            ),
        )
        self.planner.marks.check(tokenizer, str(made))
        self.check(self.planner.tokenize_tasks(views, str(made), tokenizer))
        return str(made), tokenizer

    def check(self, tokenizing: Sequence[Task]) -> None:
        """Does the text come back from the tokenizer of these tasks? With figures for the manifest."""
        tasks = tokenizer_check.check_tasks(tokenizing, self.config.split.seed)
        records = self.stages.run("checking the tokenizer", tasks)
        if not all(records) and not self.planner.is_one_pass:  # what cannot be read stops no other shard
            self.stages.stop_if_failed()
        self.tokenizer_report = tokenizer_check.figures(records)
        tokenizer_check.judge(self.tokenizer_report, self.config)

    def tokenize(self, tasks: Sequence[Task]) -> list[tuple[Task, dict[str, Any]]]:
        """The pieces of both splits, judged."""
        records = self.stages.run("tokenizing", tasks)
        if self.planner.is_one_pass:
            self._add_read(tasks, records)
        self.stages.stop_if_failed()
        for record in records:
            for name, part in record["counts"]["splits"].items():
                self.totals.splits[name].add(part)
                self.figures.add(part["figures"])
        assert self.totals.num_documents == self.totals.num_kept, "a document was lost or written twice"
        self.totals.judge_splits(self.config)
        return list(zip(tasks, records))

    def write(
        self, pieces: Sequence[tuple[Task, dict[str, Any]]], tokenizer: Tokenizer
    ) -> tuple[list[Task], list[dict[str, Any]]]:
        """One dataset a split."""
        tasks = []
        for name in SPLITS:
            summary = self.totals.splits[name].summary()
            for own in ("documents", "tokens", "unigram_entropy_nats"):  # the writer says these itself
                del summary[own]
            tasks.append(self.planner.write_task(pieces, name, tokenizer, summary))
        records = self.stages.run("writing", tasks)
        self.stages.stop_if_failed()
        for name, record in zip(SPLITS, records):
            self.totals.splits[name].unigram_entropy_nats = record["counts"]["unigram_entropy_nats"]
        return tasks, records

    def _commit(self, tasks: list[Task], records: list[dict[str, Any]], tokenizer: Tokenizer) -> dict[str, Any]:
        """Names for everything, the manifest last."""
        made = {
            f"{name}.{suffix}": self.stages.output(task, record, f"{name}.{suffix}")
            for name, task, record in zip(SPLITS, tasks, records)
            for suffix in ("bin", "json", "idx")  # with the index the dataset is there
        }
        (self.folder / places.MANIFEST).unlink(missing_ok=True)
        for split in SPLITS:
            remove_dataset(self.folder / split)
        for name, path in made.items():
            places.give_name(path, self.folder / name)
        places.join_files(self.quarantine, self.folder / places.QUARANTINE)
        places.join_files(self.dropped, self.folder / places.DROPPED, empty=EMPTY_LINES)
        write_json(self.folder / places.FIGURES, self.figures.to_json())
        manifest = sealed(self._manifest(tokenizer))
        write_json(self.folder / places.MANIFEST, manifest)
        self.rates = stage_rates(self.root)
        if self.config.output.keep_stages:
            sweep(self.root, self.stages.tasks)
        else:
            places.remove_stages(self.folder)
        return manifest

    def _manifest(self, tokenizer: Tokenizer) -> dict[str, Any]:
        names = [f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx", "json")]
        own = [] if self.config.tokenizer.path else [places.TOKENIZER, places.TOKENIZER_INFO]
        beside = [places.FIGURES, places.QUARANTINE, places.DROPPED, *own]
        names += [name for name in beside if name != places.TOKENIZER_INFO]
        config = to_dict(self.config)
        for key in ("workers", "keep_stages", "replace"):  # no byte depends on it
            del config["output"][key]
        del config["executor"]
        train = self.totals.splits["train"].summary()
        return {
            "kind": "megafp8-corpus",
            "pipeline_version": PIPELINE_VERSION,
            "config": config,
            "config_fingerprint": self.fingerprint,
            "inputs": places.inputs_record(self.source.files, self.checksums),
            "outputs": {name: (self.folder / name).stat().st_size for name in names},
            "checksums": {name: checksum_file(self.folder / name) for name in beside},  # datasets have their own
            "tokenizer": identity(tokenizer) | self.planner.marks.to_json(),
            "tokenizer_report": self.tokenizer_report,
            "unigram_entropy_nats": train["unigram_entropy_nats"],
            "bytes_per_token": train["bytes_per_token"],
            "counts": self.totals.to_json(),
        }
