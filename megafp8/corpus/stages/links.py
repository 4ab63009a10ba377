"""All edges -> for each part that loses something `N.rows.npy` (what, sorted) and `N.kept.npy` (what stays instead).

`names.json` lists the files with the ids of each part's documents.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np

from megafp8.corpus.dedup import passes
from megafp8.corpus.dedup.clusters import summary
from megafp8.corpus.dedup.components import find_links
from megafp8.corpus.tasks import Work

VERSION = 2
NAMES = "names.json"


def run(work: Work) -> dict[str, Any]:
    """`lost`: parts (numbers as strings) with how many rows they lose; `clusters` of documents.

    Inputs: edges, then the names of each part.
    """
    num_edges = work.values["num_edges"]
    edges = [work.checked(number) for number in range(num_edges)]
    scratch = work.output("scratch")
    links = find_links(edges, scratch, work.hints["memory_bytes"])
    names = [work.checked(number) for number in range(num_edges, len(work.inputs))]
    lost = {}
    for part in range(len(names)):
        rows, kept = passes.drop_list(part, links)
        if len(rows):
            np.save(work.output(rows_name(part)), rows)
            np.save(work.output(kept_name(part)), kept)
            lost[str(part)] = len(rows)
    clusters = summary(links, names, work.hints["memory_bytes"]) if work.values["unit"] == "document" else None
    shutil.rmtree(scratch)
    paths = [one.path for one in work.inputs[num_edges:]]
    work.output(NAMES).write_text(json.dumps(paths), encoding="utf-8")
    return {"lost": lost, "clusters": clusters}


def rows_name(part: int) -> str:
    """Output with the rows that a part loses."""
    return f"{part:05d}.rows.npy"


def kept_name(part: int) -> str:
    """Output with the numbers of the documents that stay in their place."""
    return f"{part:05d}.kept.npy"
