"""Does a written Hugging Face folder say what our model says? Reloaded with transformers, which shares no code with us.

Logits are compared twice. In fp32, where only the order of sums differs, the bound is tight and any wrong name, order,
transpose or rotary base breaks it. Then in the stored dtype, as a user will run it, with the bound of its rounding.
How much rounding explains is measured, by our own model in fp64 on the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megafp8.convert.by_layer import Folder, Read, TheirModel, our_logits
from megafp8.convert.hf_tokenizer import UNIGRAM
from megafp8.convert.optional import load
from megafp8.core.errors import CheckpointError
from megafp8.data.tokenizer import Tokenizer
from megafp8.models import ModelConfig

# Scripts, digits, code, white space of all kinds, characters outside a vocabulary: what tokenizers get wrong.
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps for 12,345 seconds.",
    "Größere Wörterbücher enthalten längere Wörter; Straßenbahnhaltestelle ist eines davon.",
    "日本語の文章には空白がありません。形態素解析が必要です。",
    "def area(radius):\n    if radius < 0:\n        raise ValueError('negative')\n\treturn 3.14159 * radius ** 2\n",
    "  two leading spaces, three   inside, and a trailing one ",
    "line one\n\nline three\r\nand a carriage return\ttab",
    "naïve café, e\u0301 decomposed, ﬁ ligature, ½, ™, “quotes” – and a dash — or two…",
    "🙂 emoji 👩‍🔬 joined, rare 𝔘𝔫𝔦𝔠𝔬𝔡𝔢, Ελληνικά, Русский, العربية, हिन्दी",
    "https://example.org/path?query=1&other=2#fragment <html>&amp;</html> {\"json\": [1, 2.5e-3, null]}",
    "A",
    "",
)  # fmt: skip
_MAX_TOKENS = 512
_SAFETY = 8  # see logit_bound
_OBEDIENT = ("TokenizersBackend", "PreTrainedTokenizerFast")  # classes that do what tokenizer.json says
_UNIT = 2.0**-24  # the largest relative error of one rounding to fp32


@dataclass(frozen=True)
class LogitComparison:
    """Ours against the reloaded model's, in one dtype. `kl` is the mean over positions, in nats."""

    dtype: str
    largest: float
    bound: float
    scale: float
    kl: float
    top1: float

    @property
    def good(self) -> bool:
        """Whether rounding explains the difference."""
        return self.largest <= self.bound  # False for NaN

    def __str__(self) -> str:
        return (
            f"logits in {self.dtype}: largest difference {self.largest:.3g} (bound {self.bound:.3g}, largest logit "
            f"{self.scale:.3g}), KL {self.kl:.3g} nats, top-1 agreement {self.top1:.2%}"
        )


@dataclass(frozen=True)
class Report:
    """What the comparison found; `problems` is empty where all is well."""

    logits: tuple[LogitComparison, ...]
    texts: int
    texts_differing: tuple[str, ...]
    tokenizer_class: str = ""  # that which transformers made of the files, where it has rules of its own

    @property
    def problems(self) -> list[str]:
        """What is out of bounds."""
        found = [str(comparison) for comparison in self.logits if not comparison.good]
        found += [f"tokenizer ids differ for {text!r}" for text in self.texts_differing]
        if self.texts_differing and self.tokenizer_class:
            found.append(
                f"transformers opens a tokenizer of this model_type as {self.tokenizer_class}, whose own rules replace "
                "those of tokenizer.json: train with such a tokenizer, or a family without that rule (llama, qwen3)"
            )
        return found

    def lines(self) -> Iterator[str]:
        """For people."""
        yield from map(str, self.logits)
        yield f"tokenizer: ids equal for {self.texts - len(self.texts_differing)} of {self.texts} texts"


def verify_folder(
    folder: Path,
    config: ModelConfig,
    read: Read,
    stored: torch.dtype,
    tokenizer: Tokenizer | None,
) -> Report:
    """Run `folder` through transformers, layer by layer, and compare it with our own model.

    Args:
        read: our weights by our names, in the dtypes that were written.
        stored: of most of them.
        tokenizer: the one that trained the model; None: the folder has none.

    Raises:
        ConfigError: transformers is not installed.
        CheckpointError: transformers cannot load the folder.
    """
    transformers = load("transformers", "convert with --no-verify")
    ids = sample_ids(config, tokenizer)
    exact = our_logits(config, read, ids, torch.float64)
    comparisons = []
    with Folder(folder) as tensors:
        theirs = their_model(transformers, folder, tensors)
        for dtype in dict.fromkeys((torch.float32, stored)):
            routed = bool(config.moe.num_experts) and dtype != torch.float32
            ours = our_logits(config, read, ids, dtype)
            comparisons.append(_compare(dtype, exact, ours, theirs.logits(ids, dtype), routed=routed))
    differing, kind = _differing_texts(transformers, folder, tokenizer) if tokenizer else ((), "")
    return Report(tuple(comparisons), len(TEXTS) if tokenizer else 0, differing, kind)


def sample_ids(config: ModelConfig, tokenizer: Tokenizer | None) -> torch.Tensor:
    """[1, S] ids of real text; without a tokenizer, ids spread over the vocabulary."""
    limit = min(config.max_sequence_length, _MAX_TOKENS)
    if tokenizer is None:
        return (torch.arange(limit) * 7919 % config.vocab_size).unsqueeze(0)
    ids = [tokenizer.eod_id, *(number for text in TEXTS for number in tokenizer.encode(text))]
    return torch.tensor([ids[:limit]])


def their_model(transformers: Any, folder: Path, tensors: Folder) -> TheirModel:
    """transformers' model of a folder.

    Raises:
        CheckpointError: it cannot read the configuration, or layers are missing.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the package raises of every kind
        line = (str(error).strip().splitlines() or ["no message"])[0]
        raise CheckpointError(f"{folder}: transformers cannot load it: {type(error).__name__}: {line}") from error
    return TheirModel(transformers, config, tensors, tensors.shape)


def _compare(
    dtype: torch.dtype, exact: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor, *, routed: bool
) -> LogitComparison:
    """`routed`: rounding may send a token to other experts, which changes its logits by as much as they are. Then
    half of the tokens, those that agree best, are held against the bound."""
    log_p, log_q = torch.log_softmax(ours, -1), torch.log_softmax(theirs, -1)
    return LogitComparison(
        dtype=str(dtype).removeprefix("torch."),
        largest=largest_of(ours - theirs, routed),
        bound=logit_bound(exact, ours, routed=routed),
        scale=float(exact.abs().max()),
        kl=float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        top1=float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
    )


def largest_of(difference: torch.Tensor, half: bool) -> float:
    """The largest absolute value of [S, V], or of the half of its rows where it is smallest; NaN if any is."""
    rows = difference.abs().amax(-1)
    return float(rows.median() if half and not rows.isnan().any() else rows.max())


def logit_bound(exact: torch.Tensor, ours: torch.Tensor, *, routed: bool = False) -> float:
    """How far another correct implementation's logits [S, V] may lie from `ours`; `exact`: of the same weights.

    It errs about as much as ours does, independently. What both share, and one may round otherwise, are the rotary
    frequencies, at most 1 a token and in fp32 everywhere: a unit more or less turns a head at position S by S units.
    The factor covers that the largest of S x V errors differs between implementations: up to 2 was measured over the
    families and dtypes of the tests, 10 where the frequencies are rounded otherwise (llama3's rule).
    """
    own = largest_of(ours - exact, routed)
    return _SAFETY * (own + exact.shape[0] * _UNIT * float(exact.abs().max()))


def _differing_texts(transformers: Any, folder: Path, tokenizer: Tokenizer) -> tuple[tuple[str, ...], str]:
    """The texts whose ids differ, and the class that transformers takes, if it is not the one that obeys the files."""
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the package raises of every kind
        line = (str(error).strip().splitlines() or ["no message"])[0]
        raise CheckpointError(f"{folder}: transformers cannot load its tokenizer: {line}") from error
    ties = _Ties(folder / "tokenizer.model")
    differing = []
    for text in TEXTS:
        got = theirs(text, add_special_tokens=False, verbose=False)["input_ids"]
        if got != (wanted := tokenizer.encode(text)) and not ties.hold(wanted, got):
            differing.append(text)
    kind = type(theirs).__name__
    return tuple(differing), "" if kind in _OBEDIENT else kind


class _Ties:
    """Whether two segmentations of a text are equally likely to a SentencePiece Unigram model.

    It adds scores in fp32 and the `tokenizers` package in fp64, so among equals (runs of spaces, of brackets) each may
    take another one; neither is wrong. Nothing ties in BPE.
    """

    def __init__(self, path: Path) -> None:
        self._model = None
        if path.is_file():
            data = path.read_bytes()
            spec = load("sentencepiece.sentencepiece_model_pb2").ModelProto.FromString(data).trainer_spec
            if spec.model_type == UNIGRAM:
                self._model = load("sentencepiece").SentencePieceProcessor(model_proto=data)

    def hold(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Whether ids `a` and `b` score the same up to the rounding of their fp32 sums."""
        if self._model is None or self._model.decode(list(a)) != self._model.decode(list(b)):
            return False
        one, other = (sum(self._model.get_score(number) for number in ids) for ids in (a, b))
        return abs(one - other) <= max(len(a), len(b)) * 2.0**-23 * abs(one)
