"""Which documents a tokenizer is trained on: how much of each language, and how they are found in one or two passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megafp8.core.config import to_dict
from megafp8.core.errors import DataError
from megafp8.core.log import event, get_logger
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.language_groups import ALL, quotas
from megafp8.corpus.parts import View
from megafp8.corpus.stage_run import StageRun
from megafp8.corpus.tasks import Task

_log = get_logger(__name__)
# sampled beyond what is needed on average: the sum of 1.3 times the bytes falls short once in a great many corpora
_MORE = 1.3


def first_shares(views: Sequence[View], config: CorpusConfig) -> dict[str, float]:
    """{group: share of its documents in the train split that would do, if all text were of that group}."""
    text_bytes = sum(view.text_bytes for view in views) * (1 - config.split.valid_share)
    wanted = quotas(config.tokenizer)
    return {name: min(1.0, _MORE * size / text_bytes) if text_bytes else 1.0 for name, size in wanted.items()}


def sample_tasks(views: Sequence[View], shares: Mapping[str, float], config: CorpusConfig) -> list[Task]:
    """A task for each part."""
    limits = {name: int(share * 2.0**64) for name, share in shares.items()}
    values = {"split": to_dict(config.split), "limits": limits}
    return [Task("sample", v.part.path, values, v.inputs, num_bytes=v.text_bytes) for v in views]


def sample(stages: StageRun, views: Sequence[View], config: CorpusConfig) -> tuple[list[Task], list[dict[str, Any]]]:
    """Run the tasks of `sample` until they hold enough of each group, or all of it.

    Raises:
        DataError: nothing to train on, or a language that has a weight and no text.
    """
    shares, wanted = first_shares(views, config), quotas(config.tokenizer)
    while True:
        tasks = sample_tasks(views, shares, config)
        records = stages.run("sampling text for the tokenizer", tasks)
        stages.stop_if_failed()
        sums = sums_of(records)
        more = {name: share for name in wanted if (share := _more(name, shares, wanted, sums)) > shares[name]}
        if not more:
            break
        shares |= more
    _judge(sums, wanted, config)
    return tasks, records


def _more(name: str, shares: Mapping[str, float], wanted: Mapping[str, int], sums: Mapping[str, Counter[str]]) -> float:
    """The share of a group to try next; as before if it is enough."""
    if sums["sample_bytes"][name] >= wanted[name] or not sums["train_bytes"][name]:
        return shares[name]
    return min(1.0, max(2 * shares[name], _MORE * wanted[name] / sums["train_bytes"][name]))


def sums_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """What the tasks of `sample` counted, by group; `left_out`: documents by language."""
    sums: dict[str, Counter[str]] = {}
    for record in records:
        for what, counts in record["counts"]["groups"].items():
            sums.setdefault(what, Counter()).update(counts)
    return sums


def _judge(sums: Mapping[str, Counter[str]], wanted: Mapping[str, int], config: CorpusConfig) -> None:
    if not sums["train_documents"] and not sums["left_out"]:
        raise DataError("no documents to train a tokenizer on: all are in the validation split")
    for name, size in wanted.items():
        found = sums["train_bytes"][name]
        if not found and name != ALL:
            there = ", ".join(repr(one) for one in sorted({*sums["train_documents"], *sums["left_out"]} - {ALL}))
            raise DataError(
                f"tokenizer.language_weights names {name!r}, but the train split has no text of it (it has {there}); "
                "remove it, or see source.language_key and the `language` step"
            )
        if found < size and config.tokenizer.language_weights:
            event(_log, "less text than its weight asks for", level=30, language=name, bytes=found, asked=size)
    if sums["left_out"]:
        event(_log, "languages without a weight: not trained on", documents=dict(sums["left_out"]))


def sample_facts(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What tokenizer_info.json says of the text that the sample was drawn from."""
    sums = sums_of(records)
    facts: dict[str, Any] = {name: sum(sums[name].values()) for name in ("train_documents", "train_bytes")}
    return facts | ({"left_out": dict(sums["left_out"])} if sums["left_out"] else {})
