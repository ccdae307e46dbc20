"""The import line parallel <- rollout <- megarl <- examples and the size limits, checked on the syntax tree."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("parallel", "rollout", "megarl")  # each imports only those before it, and itself
RIGHT_OF_PACKAGES = ("examples", "benchmarks", "slurm", "tests")
ONLY_PARALLEL = ("megatron", "transformer_engine", "apex", "mpi4py")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports anywhere, or reaches as an attribute of `torch` (`torch.distributed.x`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}"


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def import_faults(package: str, source: str) -> list[str]:
    """Imports in `source`, a module of `package`, that the line forbids."""
    forbidden = [*PACKAGES[PACKAGES.index(package) + 1 :], *RIGHT_OF_PACKAGES]
    if package != "parallel":
        forbidden += ONLY_PARALLEL
    if package == "megarl":
        forbidden.append("torch.distributed")
    modules = set(imported_modules(ast.parse(source)))
    relative = [module for module in modules if module.startswith(".")]
    return sorted(relative + [module for module in modules if any(is_within(module, name) for name in forbidden)])


def print_lines(source: str) -> list[int]:
    """Line numbers of calls to the builtin `print`."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return sorted(call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print")


def long_functions(source: str) -> list[str]:
    """Functions of more than MAX_FUNCTION_LINES lines, signature and docstring included."""
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    lengths = {function.name: (function.end_lineno or 0) - function.lineno + 1 for function in functions}
    return [f"{name}: {length} lines" for name, length in lengths.items() if length > MAX_FUNCTION_LINES]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_to_its_left(package):
    faults = {str(path.relative_to(ROOT)): import_faults(package, path.read_text()) for path in python_files(package)}
    assert faults, f"{package}/ holds no module"
    assert {path: found for path, found in faults.items() if found} == {}


def test_packages_do_not_print():
    faults = {str(path.relative_to(ROOT)): print_lines(path.read_text()) for path in python_files(*PACKAGES)}
    assert {path: lines for path, lines in faults.items() if lines} == {}


def test_files_stay_under_the_line_limit():
    lengths = {path: len(path.read_text().splitlines()) for path in python_files(*PACKAGES, *RIGHT_OF_PACKAGES)}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_stay_under_the_line_limit():
    faults = {path: long_functions(path.read_text()) for path in python_files(*PACKAGES, *RIGHT_OF_PACKAGES)}
    assert {str(path.relative_to(ROOT)): found for path, found in faults.items() if found} == {}


@pytest.mark.parametrize(
    ("package", "source", "faults"),
    [
        ("parallel", "import megatron.core\nimport torch.distributed as dist", []),
        ("parallel", "from rollout import engine", ["rollout", "rollout.engine"]),
        ("parallel", "def f():\n    import megarl.config", ["megarl.config"]),
        ("rollout", "from parallel.mesh import Mesh\nimport torch.distributed", []),
        ("rollout", "from megatron.core import mpu", ["megatron.core", "megatron.core.mpu"]),
        ("rollout", "import mpi4py", ["mpi4py"]),
        ("megarl", "from torch import distributed", ["torch.distributed"]),
        ("megarl", "import torch\ntorch.distributed.barrier()", ["torch.distributed"]),
        ("megarl", "from examples import demo", ["examples", "examples.demo"]),
        ("megarl", "from . import config", ["."]),
        ("megarl", "import megatron_like, parallelism\nfrom rollout.engine import Engine", []),
    ],
)
def test_import_check_names_exactly_the_forbidden_modules(package, source, faults):
    assert import_faults(package, source) == faults


def test_print_check_finds_calls_and_ignores_methods_and_text():
    assert print_lines("x = 'print()'\nlog.print()\nif x:\n    print(x)\n") == [4]


def test_function_check_counts_from_def_to_the_last_line():
    body = "    pass\n"
    assert long_functions("def ok():\n" + body * 49) == []
    assert long_functions("class A:\n  def long(self):\n" + "    pass\n" * 50) == ["long: 51 lines"]
