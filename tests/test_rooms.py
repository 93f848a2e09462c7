"""The rooms and their floors: which way imports go, how light they load, and what no source file may contain."""

from __future__ import annotations

import ast
import graphlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import soloist

PACKAGE = Path(soloist.__file__).parent

# A file imports from its own room and from the floors below. Rooms of one floor do not know each other, except that
# the files of floor 0 are one room, and so are those of floor 9.
FLOORS = {
    "errors": 0, "types": 0, "seams": 0, "metrics": 0, "methods": 0, "estimators": 0, "config": 0, "config_files": 0,
    "config_sections": 0, "config_tree": 0, "config_rules": 0, "config_uses": 0,
    "algorithms": 1,
    "models": 2,
    "engines": 3, "environments": 3,
    "rollout": 4,
    "runtime": 5,
    "training": 6,
    "recipes": 7,
    "report": 8,
    "cli": 9, "__main__": 9, "__init__": 9,
}  # fmt: skip
ONE_ROOM = {0, 9}
LATE_IMPORTS = 6
LATE_ROOMS = {"cli", "engines"}

SERIALIZERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "yaml.load"}
METHODS = {"recv_pyobj", "send_pyobj"}
KEYWORDS = {("trust_remote_code", True), ("weights_only", False), ("allow_pickle", True), ("shell", True)}


def modules() -> dict[str, Path]:
    """All modules of the package, by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["soloist", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def room(module: str) -> str:
    """First part below the package; the package's own `__init__` counts as such."""
    return [*module.split("."), "__init__"][1]


def imported(node: ast.AST) -> list[str]:
    """Modules of ours that an import statement loads."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return []
    ours = [name for name in names if name.split(".")[0] == "soloist"]
    return [name if name in MODULES else name.rpartition(".")[0] for name in ours]


def imports_of(tree: ast.AST) -> set[str]:
    """All imports but those for the type checker alone, which load nothing."""
    for_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    unloaded = {inner for node in for_types for inner in ast.walk(node)}
    return {name for node in ast.walk(tree) if node not in unloaded for name in imported(node)}


def late_imports(tree: ast.AST) -> list[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted({name for function in functions for name in imports_of(function)})


def upward(module: str, targets: set[str]) -> list[str]:
    """Imports that leave the room without going down."""
    here = room(module)
    wrong = []
    for target in sorted(targets):
        there = room(target)
        one_room = here == there or (FLOORS[here] == FLOORS[there] and FLOORS[here] in ONE_ROOM)
        if not one_room and FLOORS[there] >= FLOORS[here]:
            wrong.append(f"{module} (floor {FLOORS[here]}) imports {target} (floor {FLOORS[there]})")
    return wrong


def banned(tree: ast.AST) -> list[str]:
    """What could run code that came as data: serializers that execute, and evaluation of text."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in SERIALIZERS]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in SERIALIZERS:
            found.append(str(node.module))
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += ["torch.load" for alias in node.names if alias.name == "load"]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found += [called] if called in CALLS or called.rpartition(".")[2] in METHODS else []
            found += [
                f"{keyword.arg}={keyword.value.value}"
                for keyword in node.keywords
                if isinstance(keyword.value, ast.Constant) and (keyword.arg, keyword.value.value) in KEYWORDS
            ]
    return found


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_file_stands_in_a_room_with_a_floor() -> None:
    rooms = {room(module) for module in MODULES}
    assert rooms <= set(FLOORS)
    assert {"algorithms", "training", "cli"} <= rooms


def test_the_guide_for_contributors_names_files_that_exist() -> None:
    guide = (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/[a-z_/]+(?:\.py)?)`", guide)
    assert [path for path in named if path.split("/")[0] in FLOORS and not (PACKAGE / path).exists()] == []
    assert {"training/loop.py", "environments/base.py", "engines/local/"} <= set(named)


def test_imports_go_down_the_floors_only() -> None:
    assert [wrong for module, tree in TREES.items() for wrong in upward(module, imports_of(tree))] == []
    assert upward("soloist.algorithms.losses", {"soloist.models.policy"})
    assert upward("soloist.engines.pool", {"soloist.environments.base"})
    assert not upward("soloist.config", {"soloist.errors"})


def test_all_imports_of_our_own_are_absolute() -> None:
    relative = [
        f"{module}:{node.lineno}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert relative == []
    assert any(imports_of(tree) for tree in TREES.values())


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: imports_of(tree) - {module} for module, tree in TREES.items()}
    assert set(graphlib.TopologicalSorter(graph).static_order()) >= set(graph)
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


def test_late_imports_are_few_and_stand_where_they_may() -> None:
    late = {module: late_imports(tree) for module, tree in TREES.items()}
    assert sum(map(len, late.values())) <= LATE_IMPORTS, late
    assert {room(module) for module, names in late.items() if names} <= LATE_ROOMS


def test_no_source_file_unpickles_or_evaluates_text() -> None:
    assert {module: found for module, tree in TREES.items() if (found := banned(tree))} == {}
    assert len(TREES) > 20


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from cloudpickle import loads", "torch.load(path)", "from torch import load", "eval('1')",
     "exec(text)", "socket.recv_pyobj()", "f(trust_remote_code=True)", "torch.jit.f(weights_only=False)"],
)  # fmt: skip
def test_the_ban_finds_what_it_bans(source: str) -> None:
    assert banned(ast.parse(source))
    assert not banned(ast.parse("model.eval(); safetensors.torch.load(data); re.compile('x')"))


def test_config_and_command_line_load_without_torch() -> None:
    heavy = "print(sorted({'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)))"
    assert run_python(f"import sys, soloist.config_files, soloist.metrics, soloist.types; {heavy}") == "[]"
    assert run_python(f"import sys, soloist.cli; soloist.cli._parser().format_help(); {heavy}") == "[]"


def test_every_module_loads_without_any_optional_gpu_package() -> None:
    """RB-153: a top-level import of an optional package must not be needed, and no GPU either."""
    names = sorted({m.name for m in pkgutil.walk_packages(soloist.__path__, "soloist.")} - {"soloist.__main__"})
    code = f"""
import importlib, os, sys
os.environ['CUDA_VISIBLE_DEVICES'] = ''
for absent in ('flash_attn', 'vllm', 'sglang', 'deepspeed', 'ray', 'triton', 'bitsandbytes'):
    sys.modules[absent] = None
for name in {names!r}:
    importlib.import_module(name)
print(len(sys.modules) > 100)
"""
    assert {"soloist.cli", "soloist.report.summary"} <= set(names)
    assert run_python(code) == "True"
