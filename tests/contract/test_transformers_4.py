"""Exported folders in the last transformers 4, which much of what serves models still pins.

pip install --no-deps --target FOLDER transformers==4.57.6 tokenizers==0.22.1 huggingface_hub==0.36.0
MEGAFP8_TRANSFORMERS_4=FOLDER pytest -m slow tests/contract/test_transformers_4.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.convert import to_hf
from tests.unit.convert.test_hf import MODELS
from tests.unit.infer.models import save_model

FOLDER = os.environ.get("MEGAFP8_TRANSFORMERS_4", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER, reason="MEGAFP8_TRANSFORMERS_4 names no folder")]

_VERIFY = """
import json, sys
from pathlib import Path
import torch, transformers
from megafp8.convert.verify_hf import verify_folder
from megafp8.data.tokenizer import load_tokenizer
from megafp8.infer.weights import model_config, weights
assert transformers.__version__.startswith("4.57"), transformers.__version__
found = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    (source,) = (folder / "run").iterdir()
    read = weights(source, torch.bfloat16).__getitem__
    report = verify_folder(folder / "hf", model_config(source), read, torch.bfloat16, load_tokenizer("bytes"))
    found[folder.name] = report.problems
print(json.dumps(found))
"""


def test_every_family(tmp_path):
    for number, config in enumerate(MODELS.values()):
        source = save_model(tmp_path / str(number) / "run", config)
        to_hf(source, tmp_path / str(number) / "hf", verify=False)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([FOLDER, str(Path(__file__).parents[2])])}
    done = subprocess.run(
        [sys.executable, "-c", _VERIFY, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(MODELS) and not any(found.values()), found
