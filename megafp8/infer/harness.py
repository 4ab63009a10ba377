"""lm-evaluation-harness's model interface over our engine; needs the package lm-eval.

Texts are encoded as those of training: a context begins as a document did, and control strings in it stay text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.progress import Progress

from megafp8.core.errors import ConfigError, DataError
from megafp8.core.log import event, get_logger
from megafp8.infer.generate import Sampling, generate
from megafp8.infer.likelihood import likelihoods
from megafp8.infer.weights import Loaded

_logger = get_logger(__name__)
_NEW_TOKENS = 256  # where a task does not say how many, as in the harness's own adapter


class HarnessModel(TemplateLM):
    """A loaded model as lm-eval asks for one. With tensor parallelism every rank runs it alike."""

    def __init__(self, loaded: Loaded, *, batch: int = 8, quiet: bool = False) -> None:
        super().__init__()
        self.loaded, self.batch, self.quiet = loaded, batch, quiet

    @property
    def eot_token_id(self) -> int:
        return self.loaded.marks.context(self.loaded.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return self.loaded.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text that begins a document, or, without special tokens, of one that does not."""
        before = [] if add_special_tokens is False else self.loaded.marks.before(self.loaded.tokenizer)
        return [*before, *self.loaded.tokenizer.encode(string)]

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        with self._progress("scoring", len(pairs)) as (bar, task):
            found = likelihoods(
                self.loaded.model, pairs, batch=self.batch, on_batch=lambda done: bar.update(task, advance=done)
            )
        cut = sum(one.cut > 0 for one in found)
        if cut:
            event(_logger, "contexts longer than the model lost their beginning", contexts=cut, of=len(found))
        return [(one.log_probability, one.is_greedy) for one in found]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, each token once, in windows of the model's length that do not overlap."""
        length, pairs, owners = self.loaded.config.max_sequence_length, [], []
        for number, request in enumerate(requests):
            ids = [self.eot_token_id, *self.loaded.tokenizer.encode(request.args[0])]
            for start in range(0, len(ids) - 1, length):
                part = ids[start : start + length + 1]
                pairs.append((part[:1], part[1:]))
                owners.append(number)
        sums: dict[int, float] = defaultdict(float)
        for owner, one in zip(owners, likelihoods(self.loaded.model, pairs, batch=self.batch), strict=True):
            sums[owner] += one.log_probability
        return [sums[number] for number in range(len(requests))]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to one of its stop strings, which is left out."""
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(number)
        with self._progress("generating", len(requests)) as (bar, task):
            for numbers in groups.values():
                numbers.sort(key=lambda n: -len(requests[n].args[0]))
                for start in range(0, len(numbers), self.batch):
                    chosen = numbers[start : start + self.batch]
                    contexts, options = [requests[n].args[0] for n in chosen], requests[chosen[0]].args[1]
                    for number, text in zip(chosen, self._continue(contexts, options), strict=True):
                        texts[number] = text
                    bar.update(task, advance=len(chosen))
        return texts

    def _continue(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        new = int(options.get("max_gen_toks", _NEW_TOKENS))
        room = self.loaded.config.max_sequence_length - new
        if room < 1:
            raise ConfigError(f"a task asks for {new} new tokens; the model has {room + new} positions")
        prompts = [self.loaded.prompt_ids(text)[-room:] for text in contexts]
        heat = float(options.get("temperature", 0.0)) if options.get("do_sample", True) else 0.0
        sampling = Sampling(heat, int(options.get("top_k") or 0), float(options.get("top_p") or 1.0))
        decode = self.loaded.tokenizer.decode

        def ended(row: int, ids: list[int]) -> bool:
            text = decode(ids)
            return any(stop in text for stop in until)

        made = generate(
            self.loaded.model, prompts, max_new_tokens=new, sampling=sampling, eod_id=self.loaded.tokenizer.eod_id,
            stop=ended if until else None,
        )  # fmt: skip
        return [_before(decode(ids), until) for ids in made]

    def _progress(self, what: str, total: int) -> _Bar:
        return _Bar(what, total, self.quiet)


class _Bar:
    """A progress bar with rate and time left, on stderr."""

    def __init__(self, what: str, total: int, quiet: bool) -> None:
        self.bar = Progress(console=Console(stderr=True), transient=True, disable=quiet)
        self.what, self.total = what, total

    def __enter__(self) -> tuple[Progress, Any]:
        self.bar.start()
        return self.bar, self.bar.add_task(self.what, total=self.total)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def _before(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of `stops`."""
    for stop in stops:
        text = text.split(stop, 1)[0] if stop else text
    return text


def run_tasks(
    loaded: Loaded,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    include: str | None = None,
    batch: int = 8,
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluate on lm-eval's tasks; returns {task: {metric: value}} and which versions made them.

    Args:
        include: a folder with task files of one's own.

    Raises:
        ConfigError: an unknown task.
        DataError: a task's data cannot be fetched.
    """
    manager = TaskManager(include_path=include)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ConfigError(f"--tasks {unknown[0]}: not one of lm-eval's {len(manager.all_tasks)} tasks; see lm_eval ls")
    try:
        found = simple_evaluate(
            HarnessModel(loaded, batch=batch, quiet=quiet), tasks=list(tasks), num_fewshot=num_fewshot, limit=limit,
            task_manager=manager, log_samples=False, bootstrap_iters=1000,
        )  # fmt: skip
    except (ConnectionError, FileNotFoundError) as error:
        raise DataError(f"--tasks {', '.join(tasks)}: its data cannot be read: {error}") from error
    return {"results": found["results"], "versions": found["versions"], "n-shot": found.get("n-shot", {})}
