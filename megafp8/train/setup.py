"""What exists in a run: mesh, model, optimizer, data, in the order in which they come to be.

The environment is read here and nowhere else.
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from megafp8 import __version__
from megafp8.core import faults
from megafp8.core.errors import ConfigError
from megafp8.core.heartbeat import HEART
from megafp8.core.log import event, get_logger
from megafp8.core.rng import seed_for
from megafp8.data.blend import Blend
from megafp8.data.indexed import IndexedDataset
from megafp8.data.integrity import check_blocks, fingerprint
from megafp8.data.loader import Batch, Loader
from megafp8.data.sources import check_marks, check_tokenizer, open_blend
from megafp8.data.tokenizer import Tokenizer, load_tokenizer
from megafp8.models.builder import build_stages, named_parameters
from megafp8.models.decoder import Decoder
from megafp8.models.matrices import row_parts
from megafp8.models.stages import split_layers
from megafp8.nn.balance import routers_of
from megafp8.nn.recompute import RecomputePlan
from megafp8.nn.router import Router
from megafp8.nn.weight_codes import gathered_as_codes
from megafp8.optim.adamw import AdamW
from megafp8.optim.muon import Muon
from megafp8.parallel.buckets import GradBuckets
from megafp8.parallel.fully_shard import ShardedGrads
from megafp8.parallel.launch import init_distributed, read_launch
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.pipeline import Pipeline
from megafp8.parallel.schedules import make_schedule
from megafp8.train.config import RunConfig, batches_of, refuse_broken, section_limits

logger = get_logger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Feed(Protocol):
    """Where a step's micro-batches come from; all ranks of a data-parallel replica get the same ones."""

    consumed_samples: int

    @property
    def global_batch(self) -> int:
        """Sequences of the next step, over all replicas."""
        ...

    def next_step(self) -> list[Batch]: ...


@dataclass
class Parts:
    """All that a step touches.

    Attributes:
        stages: the pipeline stages of this rank, in model order; the whole model without a pipeline.
        named_parameters: of all of them, by global name.
        warmup_until: the last step of delayed scaling's warm-up, as in its states.
        tokenizer, corpus: None and empty in a test that brings its own batches.
    """

    config: RunConfig
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    stages: list[Decoder]
    pipeline: Pipeline
    named_parameters: list[tuple[str, torch.nn.Parameter]]
    buckets: GradBuckets | ShardedGrads
    optimizer: AdamW | Muon
    loader: Feed
    tokenizer: Tokenizer | None = None
    corpus: dict[str, Any] = field(default_factory=dict)
    warmup_until: int = field(init=False)

    def __post_init__(self) -> None:
        self.warmup_until = self.config.precision.warmup_steps

    @property
    def fp8_states(self) -> dict[str, Any]:
        """FP8 state of each linear layer of this rank by module name; empty in BF16."""
        return {name: state for stage in self.stages for name, state in stage.fp8_states.items()}

    @functools.cached_property
    def routers(self) -> dict[str, Router]:
        """The experts' routers of this rank by global name; empty in a dense model."""
        return {name: router for stage in self.stages for name, router in routers_of(stage).items()}


def start_processes(config: RunConfig) -> tuple[torch.device, Mesh]:
    """Join the other ranks and set threads, determinism and device."""
    env = dict(os.environ)
    HEART.tell(world=read_launch(env).world)
    on_gpu = torch.cuda.is_available()
    refuse_broken(config, read_launch(env).world)
    info = init_distributed(
        "cuda" if on_gpu else "cpu",
        env,
        timeout_seconds=silence_seconds(config),
        meet_seconds=config.guard.setup_timeout_seconds,
    )
    HEART.tell(job=info.job, restarts=info.restarts)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    elif not on_gpu and "OMP_NUM_THREADS" not in env:
        local = int(env.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    if config.train.deterministic:
        _be_deterministic()
    device = torch.device("cuda", info.local_rank) if on_gpu else torch.device("cpu")
    return device, make_mesh(config, info.world)


def _be_deterministic() -> None:
    """torch.use_deterministic_algorithms, but for the import of the compiler (1 s) where none is used."""
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(True)
    else:
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # read when it is imported, if it is
        torch.set_deterministic_debug_mode("error")


def make_mesh(config: RunConfig, world: int) -> Mesh:
    """The mesh of `world` processes for this model; collective."""
    model = config.model
    return build_mesh(
        config.parallel,
        world,
        kv_heads=model.num_kv_heads,
        tied_embeddings=model.tied_embeddings,
        timeout_seconds=silence_seconds(config),
    )


def silence_seconds(config: RunConfig) -> int:
    """After which a collective gives up: later than keepers do, for they can say why; at once where there are none."""
    longest = max(section_limits(config).values()) if HEART.kept else config.train.timeout_seconds
    return math.ceil(longest) + (60 if HEART.kept else 0)


def build_parts(config: RunConfig, mesh: Mesh, device: torch.device) -> Parts:
    """Build data, model and optimizer for this rank; every log line of a choice is written here."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    corpus = check_corpus(config, tokenizer)
    loader = train_loader(config, mesh, tokenizer)
    parts = assemble(config, mesh, device, loader, tokenizer=tokenizer, corpus=corpus)
    event(logger, "mesh", mesh=str(mesh), device=str(device), threads=torch.get_num_threads())
    return parts


def assemble(
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    loader: Feed,
    *,
    tokenizer: Tokenizer | None = None,
    corpus: dict[str, Any] | None = None,
) -> Parts:
    """Everything but the data, which comes in as `loader`; collective."""
    parallel, dtype = config.parallel, DTYPES[config.precision.dtype]
    schedule = partial(make_schedule, parallel.schedule, parallel.pp, parallel.virtual_stages)
    pipeline = Pipeline(schedule, mesh, overlap=parallel.overlap_p2p)
    spans = split_layers(config.model, parallel)
    # one replica has nothing to cut
    full_shard = parallel.dp_shard == "full" and mesh.place(("dp", "cp"))[1] > 1
    stages = build_stages(
        config.model,
        [spans[stage] for stage in pipeline.stages],
        mesh=mesh,
        precision=config.precision,
        seed=config.run.seed,
        dtype=dtype,
        device=device,
        recompute=RecomputePlan(config.train.recompute, config.train.recompute_layers, config.train.recompute_modules),
        compile_layers=wants_compile(config),
        full_shard=full_shard,
        splits_backward=schedule(2 * parallel.pp).splits_backward,
        tokens=config.train.micro_batch * config.data.sequence_length,
    )
    buckets: GradBuckets | ShardedGrads
    if full_shard:
        buckets = ShardedGrads(stages, mesh)
        named = buckets.named_parameters
    else:
        named = named_parameters(stages)
        buckets = GradBuckets(named, mesh, shard=parallel.dp_shard == "optimizer")
    optimizer = make_optimizer(config, mesh, stages, named)
    for stage in stages:
        stage.ready(config.train.micro_batch, config.data.sequence_length)
    return Parts(
        config, mesh, device, dtype, stages, pipeline, named, buckets, optimizer, loader, tokenizer, corpus or {}
    )


def make_optimizer(
    config: RunConfig, mesh: Mesh, stages: list[Decoder], named: list[tuple[str, torch.nn.Parameter]]
) -> AdamW | Muon:
    """The optimizer of parameters whose gradients have their place; collective where weights are gathered as codes.

    Raises:
        ConfigError: its kernel does not work here, or FP8 weights cannot be gathered as codes.
    """
    states = {name: state for stage in stages for name, state in stage.fp8_states.items()}
    coded = gathered_as_codes(stages, states, mesh) if config.precision.fp8_param_gather else {}
    how: dict[str, Any] = {"compiled": wants_compile(config), "coded": coded}
    optimizer: AdamW | Muon
    if config.optimizer.name == "muon":
        optimizer = Muon(named, config.optimizer, mesh, partial(row_parts, config.model), **how)
    else:
        optimizer = AdamW(named, config.optimizer, mesh, **how)
    optimizer.attach(*stages)
    for weight in coded.values():
        weight.free()
    if coded:
        event(logger, "FP8 weights are gathered as codes", weights=len(coded), of=len(states))
    return optimizer


def wants_compile(config: RunConfig) -> bool:
    """Whether layers are compiled: as told, and by `auto` in bf16 only, where it pays (docs/performance.md)."""
    if config.train.compile != "auto":
        return config.train.compile == "on"
    return config.precision.dtype == "bf16"


def train_loader(config: RunConfig, mesh: Mesh, tokenizer: Tokenizer) -> Loader:
    """The loader of this rank's micro-batches; set `consumed_samples` to go on from there."""
    faults.at("index")
    return Loader(
        open_train(config, tokenizer),
        micro_batch=config.train.micro_batch,
        global_batch=batches_of(config),
        dp_rank=mesh.coord("dp"),
        dp_size=mesh.size("dp"),
        eod_id=tokenizer.eod_id,
        document_mask=config.data.document_mask,
        mask_eod_loss=config.data.mask_eod_loss,
        vocab_size=config.model.vocab_size,
    )


def check_corpus(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Hold every dataset against the tokenizer and the tokenizer against the model; cheap, nothing is read whole.

    Returns:
        the tokenizer's kind, fingerprint, vocab_size and eod_id, add_bos and append_eos of the documents, with
        train_tokens, unigram_entropy_nats (the entropy of the training tokens' frequencies in nats a token, None if
        the side file does not say), and datasets: path, tokens and fingerprint of each training set.

    Raises:
        DataError: a set is missing, damaged or of another tokenizer.
        ConfigError: the model's vocabulary is smaller than the tokenizer's; documents are to be told apart by end ids
            that they do not have.
    """
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the {tokenizer.vocab_size} ids of "
            f"{config.data.tokenizer}; raise it to {-(-tokenizer.vocab_size // 128) * 128} (a multiple of 128)"
        )
    train, valid = ([IndexedDataset(one.path) for one in part] for part in (config.data.train, config.data.valid))
    for dataset in (*valid, *train):
        check_tokenizer(dataset, tokenizer)
        check_blocks(dataset)
    marks = check_marks([*train, *valid])
    if not marks.append_eos and (config.data.document_mask or config.data.mask_eod_loss):
        raise ConfigError(
            "data.document_mask and data.mask_eod_loss find documents by their end ids, and these datasets have none; "
            "turn both off, or make the datasets with tokenizer.append_eos"
        )
    return {
        "kind": tokenizer.kind,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        **marks.to_json(),
        "path": config.data.tokenizer,
        "train_tokens": sum(dataset.num_tokens for dataset in train),
        "datasets": [
            {"path": source.path, "tokens": dataset.num_tokens, "fingerprint": fingerprint(dataset)}
            for source, dataset in zip(config.data.train, train, strict=True)
        ],
        "unigram_entropy_nats": train[0].side.get("unigram_entropy_nats"),
    }


def open_train(config: RunConfig, tokenizer: Tokenizer) -> Blend:
    """The training datasets as one endless stream of samples."""
    return open_blend(
        config.data.train,
        tokenizer=tokenizer,
        sequence_length=config.data.sequence_length,
        seed=seed_for(config.run.seed, "data"),
    )


@functools.cache  # it starts git, and every checkpoint asks
def code_version() -> str:
    """The package's version, with the commit and a `+dirty` mark when it runs from a git checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return __version__
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        dirty = "+dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return __version__
    return f"{__version__}-{commit}{dirty}"


def _git(root: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
