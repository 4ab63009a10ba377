"""Each rule can fail: a small offending tree per rule, and the nearest tree that is fine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.architecture import import_rules, text_rules
from tests.architecture.sources import Source, Violation, read_sources

Rule = Callable[[Sequence[Source]], list[Violation]]
LONG = "a" * 33

# rule, path, offending text, fine text
CASES: list[tuple[Rule, str, str, str]] = [
    (import_rules.floors, "megafp8/fp8/x.py", "import megafp8.nn.y", "import megafp8.core.y"),
    (import_rules.floors, "megafp8/fp8/x.py", "from megafp8.parallel import mesh", "from megafp8.fp8 import mesh"),
    (import_rules.floors, "megafp8/core/x.py", "from ..models import z", "from . import z"),
    (import_rules.floors, "megafp8/nn/x.py", "from megafp8 import models", "from megafp8 import __version__"),
    (import_rules.floors, "megafp8/attic/x.py", "", "#"),
    (import_rules.top_imports, "megafp8/nn/x.py", "def f():\n import torch", "import torch"),
    (import_rules.top_imports, "megafp8/nn/x.py", "class A:\n def f(self):\n  from a import b", "from a import b"),
    (import_rules.top_imports, "megafp8/optim/x.py", "def f():\n import megafp8.core", "def f():\n import apex"),
    (import_rules.wildcards, "tools/x.py", "from os import *", "from os import path"),
    (import_rules.torch_free, "megafp8/corpus/x.py", "import torch.nn", "def f():\n import torch"),
    (import_rules.torch_free, "megafp8/cli/x.py", "from torch import nn", "if TYPE_CHECKING:\n import torch"),
    (import_rules.cycles, "megafp8/nn/x.py", "import megafp8.nn.b", "import megafp8.nn.leaf"),
    (import_rules.thin_packages, "megafp8/nn/__init__.py", "def f(): 1", '"""Doc."""\nimport a\n__all__ = ["a"]'),
    (text_rules.file_lines, "tests/x.py", "a = 1\n" * 401, "a = 1\n" * 400),
    (text_rules.function_lines, "tools/x.py", "def f():\n" + " a = 1\n" * 60, "def f():\n" + " a = 1\n" * 59),
    (text_rules.name_letters, "megafp8/nn/x.py", f"def f({LONG}): pass", f"def f({LONG[1:]}): pass"),
    (text_rules.name_letters, "megafp8/nn/x.py", f"{LONG} = 1", f"print({LONG})"),
    (text_rules.name_letters, "megafp8/nn/x.py", f"self.{LONG} = 1", f"self.{LONG}()"),
    (text_rules.file_names, "megafp8/nn/utils.py", "", ""),
    (text_rules.file_names, "tests/common/x.py", "", ""),
    (text_rules.docstrings, "megafp8/nn/x.py", "a = 1", '"""Doc."""\na = 1'),
    (text_rules.docstrings, "megafp8/nn/x.py", '"""Doc."""\ndef f(): pass', '"""Doc."""\ndef _f(): pass'),
    (text_rules.prints, "megafp8/nn/x.py", "print(1)", "log.print(1)"),
    (text_rules.plain_models, "megafp8/models/x.py", "a = fp8_states", '"""fp8"""\nimport megafp8.nn'),
    (text_rules.plain_models, "megafp8/models/x.py", "a = 'FP8'", "a = 'megafp8'"),
    (text_rules.plain_models, "megafp8/models/x.py", "dist.all_reduce(x)", "dist.reduce(x)"),
    (text_rules.plain_models, "megafp8/models/x.py", "from megafp8.parallel.collectives import copy_to", ""),
    (text_rules.plain_models, "megafp8/models/x.py", "if mesh.size('tp') > 1: pass", "a = f(mesh, 'tp')"),
    (text_rules.plain_models, "megafp8/models/x.py", "a = 1 if tp > 1 else 2", "a = 1 if pp else 2"),
]  # fmt: skip


def tree(root: Path, path: str, text: str) -> list[Source]:
    """A repository of one file under test and a few to import."""
    others = {
        "megafp8/nn/b.py": "from megafp8.nn import x\n", "megafp8/nn/leaf.py": "", "megafp8/parallel/mesh.py": "",
        "megafp8/models/z.py": "", "megafp8/models/__init__.py": "",
    }  # fmt: skip
    for name, content in {**others, path: text}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return read_sources(root, "megafp8", "tools", "tests")


@pytest.mark.parametrize(("rule", "path", "bad", "good"), CASES)
def test_rule_can_fail(tmp_path: Path, rule: Rule, path: str, bad: str, good: str) -> None:
    broken = [v for v in rule(tree(tmp_path / "bad", path, bad)) if v.key.startswith(path)]
    assert broken, f"{rule.__name__} let it pass"
    assert str(broken[0]).startswith(f"{path}:")
    fine = path if good else "megafp8/nn/fine.py"  # a banned name is cured by another name only
    if not path.startswith("megafp8/attic/"):
        assert not [v for v in rule(tree(tmp_path / "good", fine, good)) if v.key.startswith(fine)]
