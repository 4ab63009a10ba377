"""`python tests/gpu/launch.py MODULE ...`: run a module of this folder, whatever else is called `tests` on the path.

Some packages install a top-level package `tests`, which would win over this folder, for it has no __init__.py.
"""

import runpy
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    package = types.ModuleType("tests")
    package.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = package
    sys.path[0] = str(ROOT)  # in place of this script's folder
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
