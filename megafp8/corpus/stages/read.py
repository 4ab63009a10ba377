"""Input shard -> kept documents: reads, parses, and runs the steps up to the first global one.

Outputs: parts (`NNNNN.docs.zst`), and those of `megafp8.corpus.intake`.
"""

from __future__ import annotations

from typing import Any

from megafp8.corpus.intake import Intake
from megafp8.corpus.parts import PartWriter
from megafp8.corpus.tasks import Work

VERSION = 4


def run(work: Work) -> dict[str, Any]:
    """`Intake.counts`, and `parts`: what each holds."""
    intake, parts = Intake(work), PartWriter(work, work.values["part_bytes"])
    for document, held_out in intake.documents():
        parts.add(document, held_out)
    parts.close()
    return {**intake.counts(), "parts": parts.parts}
