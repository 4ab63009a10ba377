"""What a start imports: the compiler takes a second of every rank, so only a run that compiles pays for it."""

import subprocess
import sys

from tests.journeys.runs import environment, overrides, write_config, write_corpus

_RUN = """
import sys
from megafp8.cli.pretrain_rank import be_a_rank
code = be_a_rank(sys.argv[1], sys.argv[2:], debug=False)
import torch
assert torch.are_deterministic_algorithms_enabled()
late = "torch._dynamo" in sys.modules, "torch._inductor" in sys.modules
import torch._inductor.config
assert torch._inductor.config.deterministic
sys.exit(code or ("the compiler was imported" if any(late) else 0))
"""


def test_a_run_that_compiles_nothing_does_not_import_the_compiler(tmp_path):
    write_corpus(tmp_path / "data")
    config = write_config(tmp_path, tmp_path / "data")
    words = overrides(train__deterministic="true", precision__dtype="fp32", train__steps=4)
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(config), *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
