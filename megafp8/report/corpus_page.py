"""The page of a corpus: what went in, what became of it and why, as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from megafp8 import __version__
from megafp8.core.config import dump_toml
from megafp8.core.jsonio import write_atomic
from megafp8.corpus import folder as places
from megafp8.corpus.figures import OTHER
from megafp8.report import corpus_numbers as numbers
from megafp8.report.corpus_numbers import Corpus
from megafp8.report.plain_svg import Series, lengths_svg

HERE = Path(__file__).parent
SECTIONS = (
    ("summary", "Summary"), ("funnel", "Funnel"), ("languages", "Languages"), ("sources", "Sources"),
    ("lengths", "Lengths"), ("fertility", "Fertility"), ("duplicates", "Duplicates"), ("dropped", "Dropped"),
    ("changes", "Changes"), ("rates", "Rates"), ("configuration", "Configuration"),
)  # fmt: skip
_COLOURS = 8
_LINES = 7  # languages drawn one by one


def build_corpus(folder: Path | str, rates: Sequence[dict[str, Any]] | None = None) -> Path:
    """Write `report.html` into the folder of a finished corpus; returns its path.

    Args:
        rates: of the run that made it (`corpus.rates.stage_rates`); None: from the log of its stages, if it is there.

    Raises:
        DataError: no finished corpus. ResourceError: the folder cannot be written.
    """
    corpus = numbers.read_corpus(Path(folder), rates)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"count": count, "size": size, "percent": percent, "seconds": seconds}
    page = corpus.folder / places.REPORT
    html = environment.get_template("corpus.html").render(**_contents(corpus), version=__version__)
    write_atomic(page, html.encode())
    return page


def count(value: float) -> str:
    """A whole number with commas, or from 10 million on in millions and so on."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= factor * (10 if unit == "M" else 1):
            return f"{value / factor:,.2f} {unit}"
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes in powers of a thousand."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:,.1f} {unit}"
    return f"{value:,.0f} B"


def percent(part: float, whole: float) -> str:
    """A share, with so many digits that something never reads as nothing, nor less than all as all."""
    if not whole:
        return "\u2013"
    share = 100 * part / whole
    if part and share < 0.05:
        return "< 0.1 %"
    return "> 99.9 %" if part != whole and share > 99.95 else f"{share:.1f} %"


def seconds(value: float) -> str:
    """A time; hours and minutes where it has them."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{value:.3g} s"


def _contents(corpus: Corpus) -> dict[str, Any]:
    css = (HERE / "page.css").read_text(encoding="utf-8") + (HERE / "corpus.css").read_text(encoding="utf-8")
    samples, clusters = corpus.figures["samples"], corpus.figures["clusters"]
    languages, rows = numbers.groups(corpus, "languages"), numbers.funnel(corpus)
    return {
        "css": Markup(css),
        "sections": [one for one in SECTIONS if one[0] not in ("duplicates", "changes") or _has(corpus, one[0])],
        "title": corpus.folder.resolve().name,
        "corpus": corpus,
        "counts": corpus.counts,
        "tokenizer": corpus.manifest["tokenizer"],
        "verdict": _verdict(corpus, rows),
        "funnel": rows,
        "colours": _colours(corpus),
        "languages": languages,
        "sources": numbers.groups(corpus, "sources"),
        "lengths": _drawings(corpus, languages),
        "checked": corpus.manifest["tokenizer_report"],
        "medians": {name: numbers.median_of(bins) for name, bins in corpus.figures["tokens"].items()},
        "clusters": [_clusters(corpus, step) for step in corpus.steps if step in clusters],
        "samples": [(step, samples[step]) for step in corpus.steps if step in samples and step not in clusters],
        "toml": dump_toml(corpus.manifest["config"]),
    }


def _has(corpus: Corpus, section: str) -> bool:
    return bool(corpus.figures["clusters"] if section == "duplicates" else corpus.counts["changed"])


def _colours(corpus: Corpus) -> dict[str, str]:
    """A class for each outcome; what no step dropped has one together, the colours of steps repeat after seven."""
    steps = [outcome for outcome in corpus.outcomes if outcome in corpus.steps]
    colours = {step: f"r{1 + at % (_COLOURS - 1)}" for at, step in enumerate(steps)}
    return {outcome: colours.get(outcome, "none") for outcome in corpus.outcomes}


def _verdict(corpus: Corpus, rows: Sequence[numbers.FunnelRow]) -> list[str]:
    counts, kept = corpus.counts, corpus.kept(0)
    splits = counts["splits"]
    sentences = [
        f"{count(counts['num_records'])} records became {count(kept)} documents "
        f"({percent(kept, counts['num_records'])}, and {percent(corpus.kept(1), corpus.raw_bytes)} of the text): "
        f"{count(splits['train']['tokens'])} tokens to train on, {count(splits['valid']['tokens'])} to validate with."
    ]
    largest = sorted(rows[1:], key=lambda row: -row.lost)[:2]
    if largest and largest[0].lost:
        said = " and ".join(f"{row.label} ({percent(row.lost, counts['num_records'])})" for row in largest if row.lost)
        sentences.append(f"Most of what is gone went at: {said}.")
    return sentences


def _drawings(corpus: Corpus, languages: Sequence[numbers.Group]) -> list[dict[str, Any]]:
    """Characters and tokens of documents, a line a language; the rest of them in one."""
    names = [row.name for row in languages if row.kept[0] and not row.more and row.name != OTHER][:_LINES]
    found = []
    for what, axis in (("characters", "characters in a document"), ("tokens", "tokens in a document")):
        all_bins = corpus.figures[what]
        series = [Series(name or "no language", all_bins[name], f"run{i}") for i, name in enumerate(names)]
        rest = _joined([bins for name, bins in all_bins.items() if name not in names])
        series += [Series("other languages", rest, f"run{_LINES}")] if rest else []
        if what == "characters" and (gone := _joined(list(corpus.figures["dropped_lengths"].values()))):
            series.append(Series("dropped, all languages", gone, "muted", dashed=True))
        svg = lengths_svg(series, axis, f"Lengths of documents in {what}, by language")
        found.append({"title": what.capitalize(), "svg": Markup(svg), "series": series})
    return found


def _joined(all_bins: Sequence[dict[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for bins in all_bins:
        for edge, number in bins.items():
            sums[edge] = sums.get(edge, 0) + number
    return sums


def _clusters(corpus: Corpus, step: str) -> dict[str, Any]:
    found = corpus.figures["clusters"][step]
    return {"step": step, **found, "lines": numbers.cluster_sizes(found["sizes"])}
