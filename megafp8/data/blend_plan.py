"""What a blend will serve: samples, tokens and epochs of each source for a token budget, before a run is started.

Weights are given, or come from sizes and a temperature T: shares in proportion to tokens^(1/T). T = 1 takes sources as
large as they are, a larger T lifts the small ones (Conneau et al. 2020, arXiv:1911.02116, section 3.1, where the
exponent 1/T is alpha; Xue et al. 2021, arXiv:2010.11934, take 0.3).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megafp8.core.errors import ConfigError, DataError
from megafp8.data.blend import Blend, check_weights
from megafp8.data.indexed import IndexedDataset
from megafp8.data.merge import common_tokenizer
from megafp8.data.samples import SampleStream

# repeated tokens are worth nearly as much as new ones up to here (Muennighoff et al. 2023, arXiv:2305.16264)
MANY_EPOCHS = 4.0
MAX_EPOCHS = 100.0


@dataclass(frozen=True)
class Source:
    """One source of a blend.

    Attributes:
        samples_an_epoch: samples that it holds.
        share: of the blend, all together 1.
        samples: that it serves.
        epochs: how often it is gone through.
        repeats: how often its most frequent sample is served.
    """

    path: str
    documents: int
    tokens: int
    samples_an_epoch: int
    share: float
    samples: int
    served_tokens: int

    @property
    def epochs(self) -> float:
        """How often it is gone through."""
        return self.samples / self.samples_an_epoch

    @property
    def repeats(self) -> int:
        """How often its most frequent sample is served."""
        return -(-self.samples // self.samples_an_epoch)


@dataclass(frozen=True)
class BlendPlan:
    """All sources, and the samples and tokens of the whole."""

    sources: list[Source]
    num_samples: int
    sequence_length: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained on."""
        return self.num_samples * self.sequence_length

    @property
    def warnings(self) -> list[str]:
        """What should be looked at again, a line each."""
        found = []
        for source in self.sources:
            if source.epochs > MANY_EPOCHS:
                most = MANY_EPOCHS * source.samples_an_epoch / self.num_samples
                found.append(
                    f"{source.path}: {source.epochs:.1f} epochs; beyond {MANY_EPOCHS:g}, repeated text is worth less "
                    f"and less; {MANY_EPOCHS:g} of {self.num_tokens:,} tokens are a share of {most:.4g}, not "
                    f"{source.share:.4g}"
                )
            if not source.samples:
                found.append(
                    f"{source.path}: serves no sample; its share of {source.share:.3g} is less than one of them"
                )
        return found


def plan_blend(
    paths: Sequence[str],
    *,
    sequence_length: int,
    num_tokens: int = 0,
    weights: Sequence[float] = (),
    temperature: float = 1.0,
    seed: int = 1234,
    max_epochs: float = MAX_EPOCHS,
) -> BlendPlan:
    """What each source serves of `num_tokens` (0: as many as all hold together).

    Args:
        weights: one for each source; without them shares come from sizes and the temperature.
        seed: `train.seed` of the run, which decides who takes the turns that do not come out even.

    Raises:
        ConfigError: a source twice, weights or a temperature that are no positive numbers, fewer tokens than a sample.
        DataError: a source is missing, damaged, too short for a sample, of another tokenizer; one would be gone through
            more than `max_epochs` times.
    """
    if not paths:
        raise ConfigError("no source; name path prefixes or corpus folders")
    if sequence_length < 1:
        raise ConfigError(f"--sequence-length {sequence_length}: has to be at least 1")
    if not 0 < temperature < math.inf:
        raise ConfigError(f"--temperature {temperature:g}: has to be a positive number; 1 goes by size, 3 is usual")
    places = [str(Path(path).resolve()) for path in paths]
    if twice := [path for path, place in zip(paths, places) if places.count(place) > 1]:
        raise ConfigError(f"{twice[0]}: named twice; name it once, with the sum of the weights")
    datasets = [IndexedDataset(path) for path in paths]
    common_tokenizer(datasets, None)
    streams = [SampleStream(dataset, sequence_length, seed) for dataset in datasets]
    sizes = [float(dataset.num_tokens) for dataset in datasets]
    weights = list(weights) or [(size / max(sizes)) ** (1 / temperature) for size in sizes]
    check_weights(weights)
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]  # what `data_section` writes: the run counts by the same numbers
    blend = Blend(streams, shares, seed)
    held = sum(stream.num_samples for stream in streams)
    if num_tokens and num_tokens < sequence_length:
        raise ConfigError(f"--tokens {num_tokens:,}: less than one sample of {sequence_length:,}")
    num_samples = num_tokens // sequence_length if num_tokens else held
    sources = [
        Source(path, dataset.num_documents, dataset.num_tokens, stream.num_samples, share, count,
               count * sequence_length)
        for path, dataset, stream, share, count in zip(paths, datasets, streams, shares, blend.counts(num_samples))
    ]  # fmt: skip
    for source in sources:
        if source.epochs > max_epochs:
            raise DataError(
                f"{source.path}: {source.epochs:,.0f} epochs of its {source.tokens:,} tokens; give it less weight, "
                f"ask for fewer tokens, or allow it with --max-epochs {math.ceil(source.epochs)}"
            )
    return BlendPlan(sources, num_samples, sequence_length)


def data_section(plan: BlendPlan, *, tokenizer: str, valid: Sequence[tuple[str, str]]) -> str:
    """The [data] section of a run's configuration.

    Args:
        tokenizer: what `data.tokenizer` names; empty: to be filled in.
        valid: (path, name) of datasets to evaluate on.
    """
    lines = ["[data]", f"sequence_length = {plan.sequence_length}"]
    if tokenizer:
        lines.append(f"tokenizer = {json.dumps(tokenizer, ensure_ascii=False)}")
    else:
        lines.append('# tokenizer = "..."  (not found beside the datasets: name the one that wrote them)')
    lines += ["train = ["]
    lines += [
        f"  {{ path = {json.dumps(source.path, ensure_ascii=False)}, weight = {source.share!r} }},"
        for source in plan.sources
    ]
    lines.append("]")
    if valid:
        lines.append("valid = [")
        for path, name in valid:
            pair = f"path = {json.dumps(path, ensure_ascii=False)}, name = {json.dumps(name, ensure_ascii=False)}"
            lines.append(f"  {{ {pair} }},")
        lines.append("]")
    return "\n".join(lines)
