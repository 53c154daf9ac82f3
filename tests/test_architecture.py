"""The floor plan: imports point one way, what is heavy is loaded late, and files, functions and signatures stay small.

The order of the modules is the table in docs/pages/design.md. The lists of exceptions below are exact: what is mended must
leave them, so that they can only shrink.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import opacus_expm

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "opacus_expm"
LINES, FUNCTION_LINES, PARAMETERS = 500, 60, 15

LONG_FILES = {"opacus_expm/engine.py"}  # more than half of it are docstrings, which are the reference
# The two that parallel Opacus's own.
WIDE_SIGNATURES = {
    "opacus_expm/engine.py:ExpMQuadEngine.make_private_expm",
    "opacus_expm/engine.py:ExpMQuadEngine.make_private_with_epsilon",
}


def modules() -> dict[str, Path]:
    """The package's modules by name, without the package's own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def order() -> list[str]:
    """The modules as the design page lists them; the entry points come last, and a room after what is in it."""
    text = (ROOT / "docs" / "pages" / "design.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]+`) \|", text.split("| module | what it is for |")[1], flags=re.MULTILINE)
    listed = re.findall(r"`([\w.]+)`", " ".join(cells))
    rooms = dict.fromkeys(name.partition(".")[0] for name in listed if "." in name)
    for room in rooms:
        listed.insert(max(i for i, name in enumerate(listed) if name.startswith(f"{room}.")) + 1, room)
    return [*listed, "__init__", "__main__"]


def imported(source: str, names: set[str]) -> set[str]:
    """The package's modules that a source imports, at whatever depth: also inside functions and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {
                a.name.partition(".")[2] or "__init__" for a in node.names if a.name.split(".")[0] == "opacus_expm"
            }
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            root, _, module = (node.module or "").partition(".")
            if root == "opacus_expm":
                full = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
                found |= {name if name in names else module or "__init__" for name in full}
    return found


def arrows_up(module: str, source: str, places: list[str]) -> set[tuple[str, str]]:
    """The imports of a module that do not point to what is above it."""
    return {(module, t) for t in imported(source, set(places)) if places.index(t) >= places.index(module)}


def functions(source: str) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name."""

    def inside(node: ast.AST, prefix: str) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        found = []
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            name = f"{prefix}{child.name}" if named else prefix
            if named and not isinstance(child, ast.ClassDef):
                found.append((name, child))
            found += inside(child, f"{name}." if named else prefix)
        return found

    return inside(ast.parse(source), "")


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first to the last, without the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        text = function.body[0]
        lines -= text.end_lineno - text.lineno + 1
    return lines


def width(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters, without the object itself."""
    taken = function.args
    named = [a.arg for a in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    return len([a for a in named if a not in ("self", "cls")]) + (taken.vararg is not None) + (taken.kwarg is not None)


def sources() -> dict[str, str]:
    """The package's and the benchmarks' files."""
    paths = [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def named_functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of the package and the benchmarks, with its file."""
    return [(f"{file}:{name}", function) for file, text in sources().items() for name, function in functions(text)]


# --- doors -----------------------------------------------------------------------------------------------------------


def test_every_module_has_its_place_on_the_design_page():
    listed = order()
    assert len(listed) == len(set(listed))
    assert set(listed) == set(modules())


def test_imports_point_one_way():
    places = order()
    found = {
        arrow for name, path in modules().items() for arrow in arrows_up(name, path.read_text(encoding="utf-8"), places)
    }
    assert found == set()


@pytest.mark.parametrize(("room", "doors"), [("experiments", {"__init__", "cli"}), ("audit", {"cli"})])
def test_a_leaf_is_imported_by_the_entry_points_alone(room, doors):
    names = set(modules())
    importers = {
        name
        for name, path in modules().items()
        if any(target.split(".")[0] == room for target in imported(path.read_text(encoding="utf-8"), names))
    }
    assert {name for name in importers if name.split(".")[0] != room} == doors


def test_the_package_needs_neither_benchmarks_nor_tests():
    outside = {"benchmarks", "tests", "conftest", *(path.stem for path in (ROOT / "tests").rglob("*.py"))}
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                assert not outside & {name.split(".")[0] for name in named}, path


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("from opacus_expm import first, NAME", {"first", "__init__"}),
        ("from opacus_expm.second import NAME", {"second"}),
        ("from opacus_expm.room import inner", {"room.inner"}),
        ("import opacus_expm", {"__init__"}),
        ("import opacus_expm.room.inner as inner", {"room.inner"}),
        ("def f():\n    from opacus_expm.second import NAME", {"second"}),
        ("if TYPE_CHECKING:\n    from opacus_expm import second", {"second"}),
        ("import torch\nfrom os import path", set()),
    ],
)
def test_an_arrow_up_is_seen(source, targets):
    places = ["first", "second", "room", "room.inner", "__init__"]
    assert imported(source, set(places)) == targets
    assert arrows_up("first", source, places) == {("first", target) for target in targets}
    assert arrows_up("second", source, places) == {("second", target) for target in targets - {"first"}}


# --- what an import loads --------------------------------------------------------------------------------------------

LOADED = """
import json, sys
import opacus_expm
first = sorted(sys.modules)
from opacus_expm import Comparison, compare, datasets, tasks
where = [compare.__module__, Comparison.__module__, datasets.__name__, tasks.__name__]
print(json.dumps([first, sorted(sys.modules), where]))
"""


@pytest.mark.slow
def test_importing_the_package_loads_no_experiment_no_audit_and_no_plots():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, cwd=ROOT)
    alone, asked, where = json.loads(done.stdout)
    heavy = ("matplotlib", "opacus_expm.experiments", "opacus_expm.audit", "opacus_expm.baselines", "opacus_expm.cli")
    assert "opacus_expm.engine" in alone
    assert [name for name in alone if name.startswith(heavy)] == []
    assert "opacus_expm.experiments.downloads" in asked
    assert [name for name in asked if name.startswith(("matplotlib", "opacus_expm.audit"))] == []
    assert where == [f"opacus_expm.experiments.{name}" for name in ("compare", "results", "datasets", "tasks")]


def test_names_that_are_loaded_late_are_listed_and_others_are_refused():
    assert {"Comparison", "compare", "datasets", "tasks"} <= set(dir(opacus_expm))
    assert set(opacus_expm.__all__) <= set(dir(opacus_expm))
    with pytest.raises(AttributeError, match="module 'opacus_expm' has no attribute 'comparison'"):
        _ = opacus_expm.comparison


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_files_are_short():
    assert {name for name, text in sources().items() if len(text.splitlines()) > LINES} == LONG_FILES


def test_functions_are_short():
    assert {name for name, function in named_functions() if length(function) > FUNCTION_LINES} == set()


def test_signatures_are_narrow():
    assert {name for name, function in named_functions() if width(function) > PARAMETERS} == WIDE_SIGNATURES


METHOD = '''
class A:
    def f(self, x, *, y, **z):
        """Two
        lines."""
        def g(a, /, *b):
            return a
        return g
'''


def test_sizes_are_measured_as_they_are_meant():
    (outer, f), (inner, g) = functions(METHOD)
    assert (outer, inner) == ("A.f", "A.f.g")
    assert (length(f), width(f)) == (4, 3)
    assert (length(g), width(g)) == (2, 2)


# --- benchmarks ------------------------------------------------------------------------------------------------------


def test_benchmarks_shadow_nothing_and_leave_the_path_alone():
    for name, text in sources().items():
        if name.startswith("benchmarks/"):
            assert Path(name).stem not in sys.stdlib_module_names, name
            paths = [
                n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute) and ast.unparse(n) == "sys.path"
            ]
            assert paths == [], name
