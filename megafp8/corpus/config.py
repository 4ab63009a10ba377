"""The configuration of a corpus: where text comes from, how it is split, which tokenizer, where tokens go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.step_registry import step_problems


@config_dataclass
class SourceConfig:
    """Where documents come from."""

    kind: Annotated[
        Literal["jsonl", "text", "source_tree", "parquet", "warc", "wikipedia", "python_stdlib"],
        Field(
            description="jsonl: one object a line; text: one file a document; source_tree: the text files of folders; "
            "parquet: one row a document; warc: web pages of WARC or WET; wikipedia: articles of an XML dump; "
            "python_stdlib: this Python's own docs"
        ),
    ]
    files: Annotated[
        tuple[str, ...],
        Field(description="paths, globs (** too) or URLs (s3://...); plain, .gz, .bz2 and .zst are told by content"),
    ] = ()
    valid_files: Annotated[
        tuple[str, ...],
        Field(description="the same for files whose documents are all for validation, whatever split.valid_share says"),
    ] = ()
    languages: Annotated[
        tuple[str, ...], Field(description="take documents of these languages only; empty: of all; others are counted")
    ] = ()
    text_key: Annotated[str, Field(min_length=1, description="jsonl: key of the text")] = "text"
    id_key: Annotated[str, Field(description="jsonl: key of the document's id; where it is missing: file:line")] = "id"
    language_key: Annotated[str, Field(description="jsonl: key of the language")] = "lang"
    source_key: Annotated[str, Field(description="jsonl: key of the source; where it is missing: the file")] = "source"
    metadata_keys: Annotated[tuple[str, ...], Field(description="jsonl, parquet: keys kept with the document")] = ()
    suffixes: Annotated[
        tuple[str, ...], Field(description="source_tree: with what the names of files that are read end")
    ] = (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh", ".md", ".rst")
    language: Annotated[str, Field(description="language of documents that do not say")] = ""
    encoding: Annotated[str, Field(description="text: how the files are encoded; nothing is guessed")] = "utf-8"
    source_bytes: Annotated[
        int, Field(ge=0, description="python_stdlib: take whole source files, in a fixed order, up to so many bytes")
    ] = 0
    max_record_bytes: Annotated[int, Field(gt=0, description="longer lines or text files are refused as bad")] = 1 << 26
    on_error: Annotated[
        Literal["quarantine", "stop"],
        Field(description="a bad record is listed and counted, and the run goes on; or the first one stops the run"),
    ] = "quarantine"
    max_bad_share: Annotated[
        float, Field(ge=0, le=1, description="the run fails when more than this share of records is bad")
    ] = 0.01
    keep_damaged_files: Annotated[
        bool, Field(description="take what could be read of cut or damaged files, instead of failing at the end")
    ] = False

    def __post_init__(self) -> None:
        for name in ("files", "valid_files") if self.kind == "python_stdlib" else ():
            if getattr(self, name):
                raise ValueError(f"{name} is for the other kinds; python_stdlib reads this Python, remove it")
        if self.kind != "python_stdlib" and not self.files:
            raise ValueError(f'files is empty, but kind is "{self.kind}"; give paths or globs')
        try:
            "".encode(self.encoding)
        except LookupError:
            raise ValueError(f"encoding {self.encoding!r} is not known to Python; e.g. utf-8, cp932, latin-1") from None


@config_dataclass
class SplitConfig:
    """Train and validation, by a hash of each document's text: no document moves when the corpus grows."""

    valid_share: Annotated[float, Field(ge=0, lt=1, description="share of documents kept for validation")] = 0.02
    seed: Annotated[int, Field(ge=0, lt=1 << 64, description="chooses which documents")] = 1234


@config_dataclass
class TokenizerConfig:
    """A tokenizer to load, or how to train one on the train split."""

    path: Annotated[
        str, Field(description='.model, tokenizer.json, its folder, or "bytes"; empty: train a SentencePiece model')
    ] = ""
    algorithm: Annotated[Literal["bpe", "unigram"], Field(description="training: SentencePiece's model type")] = "bpe"
    vocab_size: Annotated[int, Field(ge=261, description="training: ids in all, with 4 control ids and 256 bytes")] = (
        8192
    )
    train_bytes: Annotated[
        int, Field(gt=0, description="training: sample of so many bytes; BPE takes about 12 bytes of memory for each")
    ] = 50_000_000
    character_coverage: Annotated[
        float, Field(gt=0, le=1, description="training: share of characters with a piece; the rest falls back to bytes")
    ] = 0.9995
    language_weights: Annotated[
        dict[str, float],
        Field(description='training: share of the sample by language, relative; "*": all others; empty: as it comes'),
    ] = field(default_factory=dict)
    byte_fallback: Annotated[bool, Field(description="training: bytes for what has no piece; off: unknown")] = True
    split_digits: Annotated[bool, Field(description="training: each digit is a piece of its own")] = True
    split_scripts: Annotated[
        bool, Field(description="training: no piece crosses from one script to another, or from letters to numbers")
    ] = True
    split_words: Annotated[bool, Field(description="training: no piece goes over a space")] = True
    max_piece_length: Annotated[int, Field(ge=1, le=512, description="training: characters of the longest piece")] = 16
    symbols: Annotated[
        tuple[str, ...], Field(description="training: always a piece of their own, wherever a text spells them")
    ] = ()
    control_symbols: Annotated[
        tuple[str, ...], Field(description="training: ids that no text gives, such as <|im_start|>")
    ] = ()
    add_bos: Annotated[bool, Field(description="a begin id before each document")] = False
    append_eos: Annotated[bool, Field(description="an end id behind each document")] = True
    max_lossy_share: Annotated[
        float, Field(ge=0, le=1, description="share of sampled documents that need not come back from their ids")
    ] = 0.0

    def __post_init__(self) -> None:
        problems = [*self._symbol_problems(), *self._weight_problems()]
        if not (self.add_bos or self.append_eos):
            problems.append("append_eos is off and add_bos not on: documents would run together; turn one of them on")
        if problems:
            raise ValueError("\n".join(problems))

    def _symbol_problems(self) -> Iterator[str]:
        both = [("symbols", one) for one in self.symbols] + [("control_symbols", one) for one in self.control_symbols]
        for number, (name, one) in enumerate(both):
            if not one or one in ("<unk>", "<s>", "</s>", "<pad>"):
                yield f"{name}: {one!r} is empty or a control piece that is there already; remove it"
            elif one in [other for _, other in both[:number]]:
                yield f"{name}: {one!r} stands twice among symbols and control_symbols; remove one"
            elif any(c in one for c in "\0\u2581\u2585"):
                yield f"{name}: {one!r} holds NUL, U+2581 or U+2585, which SentencePiece keeps for itself; change it"
        if both and 4 + 256 * self.byte_fallback + len(both) >= self.vocab_size:
            yield f"vocab_size {self.vocab_size} has no room beside {len(both)} symbols; raise it"

    def _weight_problems(self) -> Iterator[str]:
        for name, weight in self.language_weights.items():
            if not 0 < weight < float("inf"):
                yield f"language_weights.{name} = {weight:g}: has to be above 0; leave out what is not to be there"


@config_dataclass
class OutputConfig:
    """Where results go, in which order, and how many processes work (which changes no byte)."""

    folder: Annotated[str, Field(min_length=1, description="train.*, valid.*, tokenizer.model, manifest.json")]
    workers: Annotated[
        int, Field(ge=0, description="processes; 0: one for each CPU here, 16 on a cluster; 1: none besides")
    ] = 0
    shuffle: Annotated[
        bool, Field(description="deal the documents of each split in a random order; off: the order of the input")
    ] = False
    shuffle_seed: Annotated[int, Field(ge=0, lt=1 << 64, description="chooses the order")] = 1234
    replace: Annotated[
        bool, Field(description="let go of a finished corpus in the folder that was made from other files")
    ] = False
    keep_stages: Annotated[
        bool, Field(description="keep what lies between stages, so that added files cost only themselves")
    ] = True


@config_dataclass
class ExecutorConfig:
    """Where tasks run and how large they are; no token depends on it (the manifest lists checksums by range)."""

    kind: Annotated[Literal["local", "slurm", "ray"], Field(description="processes here, a job array, or Ray")] = (
        "local"
    )
    retries: Annotated[int, Field(ge=0, description="a task that fails is tried again so often, then set aside")] = 2
    shard_bytes: Annotated[
        int, Field(gt=0, description="input bytes of a task: small files go together, large plain jsonl files are cut")
    ] = 1 << 26
    part_bytes: Annotated[int, Field(gt=0, description="text of a task behind reading")] = 1 << 26
    memory_bytes: Annotated[
        int, Field(ge=1 << 20, description="what a task of a global step, or of the shuffle, may hold at once")
    ] = 1 << 30
    options: Annotated[tuple[str, ...], Field(description="slurm: more options for sbatch, e.g. --partition=cpu")] = ()
    poll_seconds: Annotated[float, Field(gt=0, description="slurm: between looks at records and queue")] = 5.0
    lease_seconds: Annotated[
        float, Field(gt=0, description="slurm: a worker not heard of for so long loses its task to another")
    ] = 60.0
    address: Annotated[
        str, Field(description='ray: head node as host:port, or "auto"; empty: a Ray of this machine')
    ] = ""

    def __post_init__(self) -> None:
        for name, kind in (("options", "slurm"), ("address", "ray")):
            if getattr(self, name) and self.kind != kind:
                raise ValueError(f'{name} is for executor.kind "{kind}", it is "{self.kind}"; remove one of them')


@config_dataclass
class CorpusConfig:
    """`corpus.toml`."""

    source: SourceConfig
    output: OutputConfig
    split: SplitConfig = field(default_factory=SplitConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    steps: Annotated[
        tuple[dict[str, Any], ...],
        Field(description='what is done with each document, in this order: a table with a "kind" and its own options'),
    ] = ()

    executor: ExecutorConfig = field(default_factory=ExecutorConfig)

    def __post_init__(self) -> None:
        if problems := step_problems(self.steps):
            raise ValueError("\n".join(problems))
