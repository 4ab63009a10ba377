"""P1, P3, P5, P6, P8: what the code does not do anywhere, read off its syntax; and that the reader would see it."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

import pytest

from tests.architecture.sources import ROOT, Source, read_sources

PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
ARCHIVES = {"tarfile", "zipfile", "shutil.unpack_archive"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "torch.save", "yaml.load",
         "numpy.load", "np.load", "subprocess.getoutput", "tempfile.mktemp", "torch.hub.load"}  # fmt: skip
# Names of modules that are made of a value: each such value is one of a fixed list, or names the user's own code and
# is documented as such (corpus `score`).
DYNAMIC_IMPORTS = {
    "megafp8/cli/main.py", "megafp8/checkpoint/__init__.py", "megafp8/convert/__init__.py",
    "megafp8/convert/optional.py", "megafp8/corpus/readers.py", "megafp8/corpus/stage_run.py",
    "megafp8/corpus/step_registry.py",
    "megafp8/corpus/steps/score.py", "megafp8/corpus/tasks.py", "megafp8/fp8/recipe.py", "megafp8/models/__init__.py",
    "megafp8/report/__init__.py", "megafp8/train/__init__.py",
}  # fmt: skip

# Megatron's checkpoints are pickled: one program reads them, confined, and one module writes them.
FOREIGN = {
    "megafp8/convert/megatron_pickles.py": ("imports pickle", "imports zipfile"),
    "megafp8/convert/megatron_out.py": ("calls torch.save",),
}


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def findings(source: Source) -> Iterator[str]:
    """What a file must not do, in words."""
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.split(".")[0] in PICKLERS | ARCHIVES:
                    yield f"{source.path}:{node.lineno} imports {name}"
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            yield f"{source.path}:{node.lineno} binds to every interface"
        if not isinstance(node, ast.Call):
            continue
        name, where = name_of(node.func), f"{source.path}:{node.lineno}"
        given = {word.arg: word.value for word in node.keywords}
        if name in CALLS and not _safe_load(name, given):
            yield f"{where} calls {name}"
        for word in ("shell", "trust_remote_code", "allow_pickle"):
            value = given.get(word)
            if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
                yield f"{where} passes {word}"
        fixed = bool(node.args) and isinstance(node.args[0], ast.Constant)
        if name.endswith("import_module") and not fixed and source.path not in DYNAMIC_IMPORTS:
            yield f"{where} imports a module by a value"


def _safe_load(name: str, given: dict[str | None, ast.expr]) -> bool:
    """numpy.load refuses pickles by default, torch.load where it is told to."""
    if name == "torch.load":
        value = given.get("weights_only")
        return isinstance(value, ast.Constant) and value.value is True
    return name in ("np.load", "numpy.load")


def test_no_file_of_the_package_does_it():
    sources = read_sources(ROOT, "megafp8", "tools")
    assert len(sources) > 200
    found = [(source.path, line) for source in sources for line in findings(source)]
    assert [line for path, line in found if not line.endswith(FOREIGN.get(path, "\0"))] == []
    assert not any("convert.megatron_pickles" in source.text for source in sources)  # only ever run, never imported


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import pickle", "imports pickle"),
        ("from dill import loads", "imports dill"),
        ("import tarfile", "imports tarfile"),
        ("eval('1')", "calls eval"),
        ("import torch\ntorch.load('x')", "calls torch.load"),
        ("torch.load('x', weights_only=False)", "calls torch.load"),
        ("torch.save({}, 'x')", "calls torch.save"),
        ("np.load('x', allow_pickle=True)", "passes allow_pickle"),
        ("subprocess.run('ls', shell=True)", "passes shell"),
        ("AutoModel.from_pretrained('x', trust_remote_code=flag)", "passes trust_remote_code"),
        ("os.system('ls')", "calls os.system"),
        ("importlib.import_module(name)", "imports a module by a value"),
        ("server.bind(('0.0.0.0', 80))", "binds to every interface"),
    ],
)
def test_the_reader_would_see_it(code, said):
    (found,) = findings(Source("megafp8/x.py", textwrap.dedent(code)))
    assert said in found


def test_templates_and_scripts_hold_no_remote_code_and_no_open_port():
    for path in (*ROOT.glob("examples/**/*"), *ROOT.glob("megafp8/**/*.html"), ROOT / ".ci/run", ROOT / "Makefile"):
        if path.is_file() and path.suffix != ".png":
            text = path.read_text(encoding="utf-8")
            assert not any(word in text for word in ("trust_remote_code", "0.0.0.0", "curl ", "--bind_all")), path
