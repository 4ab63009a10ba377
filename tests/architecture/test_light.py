"""`megafp8 --help`, and each verb's, start at once: no torch, no transformers, no matplotlib."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megafp8.cli.main import VERBS
from tests.architecture.sources import ROOT

HEAVY = ("torch", "transformers", "matplotlib", "tensorboard", "sentencepiece")
PROGRAM = """
import contextlib, io, json, resource, sys
from megafp8.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main(sys.argv[1:])
usage = resource.getrusage(resource.RUSAGE_SELF)
heavy = [name for name in HEAVY if name in sys.modules]
print(json.dumps({"text": out.getvalue(), "heavy": heavy, "seconds": usage.ru_utime + usage.ru_stime}))
"""


def ask(*words: str) -> dict:
    code = PROGRAM.replace("HEAVY", repr(HEAVY))
    run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("module", ["megafp8.train.check", "megafp8.corpus.run"])
def test_dry_run_and_corpus_need_no_torch(module: str) -> None:
    # what is imported by what is imported counts here, which no rule on single files sees
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_help_loads_nothing_heavy_and_takes_under_a_second() -> None:
    # CPU time of the best of three: wall time on a busy machine says nothing about the program
    answers = [ask("--help") for _ in range(3)]
    assert answers[0]["heavy"] == []
    assert min(answer["seconds"] for answer in answers) < 1.0
    assert all(verb in answers[0]["text"] for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_verb_help_is_light_and_shows_examples(verb: str) -> None:
    answer = ask(verb, "--help")
    assert answer["heavy"] == []
    assert f"megafp8 {verb}" in answer["text"].split("examples:")[-1], "the help page shows an example of the verb"
