"""README and docs: code that compiles, names and links that exist, complete tables, proofs whose tests are there."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_expm
from opacus_expm import ExpMQuadEngine, Sparse, Stiefel, Structured, audit

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pages"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(FOLDER.glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")
NAMED_TEST = re.compile(r"`(tests/[\w/]*test_\w+\.py)::(\w+)`")


def text_of(path):
    return path.read_text(encoding="utf-8")


def blocks(text):
    """The Python blocks of a page."""
    return [code for language, code in FENCE.findall(text) if language == "python"]


def missing_names(code):
    """What a block imports from the package that is not there."""
    missing = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "opacus_expm":
            module = importlib.import_module(node.module)
            for alias in node.names:
                try:
                    getattr(module, alias.name)
                except AttributeError:
                    try:
                        importlib.import_module(f"{node.module}.{alias.name}")
                    except ImportError:
                        missing.append(alias.name)
    return missing


def anchors(text):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)) for heading in headings]
    return {heading.strip().lower().replace(" ", "-") for heading in plain}


def broken_links(path, text):
    """Relative links of a page that lead nowhere."""
    broken = []
    for link in LINK.findall(FENCE.sub("", text)):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        exists = target == path or target.is_file()
        if not exists or (anchor and anchor not in anchors(text if target == path else text_of(target))):
            broken.append(link)
    return broken


def missing_tests(text):
    """Tests that a page names and that are not defined."""
    missing = []
    for name, function in NAMED_TEST.findall(text):
        file = ROOT / name
        defined = re.search(rf"^def {function}\(", text_of(file), re.MULTILINE) if file.is_file() else None
        if not defined:
            missing.append(f"{name}::{function}")
    return missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_compiles_and_imports_what_exists(path):
    for code in blocks(text_of(path)):
        compile(code, str(path), "exec")
        assert missing_names(code) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    assert broken_links(path, text_of(path)) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_named_tests_are_there(path):
    assert missing_tests(text_of(path)) == []


def test_what_is_wrong_is_noticed():
    assert missing_names("from opacus_expm import ExpMQuadEngine, audit, nothing") == ["nothing"]
    page = "# A title\n\n[a](#a-title) [b](#b) [c](README.md#two-commands) [d](README.md#three) [e](absent.md)\n"
    assert broken_links(ROOT / "page.md", page) == ["#b", "README.md#three", "absent.md"]
    named = (
        "`tests/test_docs.py::test_links_lead_somewhere` `tests/test_docs.py::test_nothing` `tests/test_no.py::test_a`"
    )
    assert missing_tests(named) == ["tests/test_docs.py::test_nothing", "tests/test_no.py::test_a"]


def test_guarantees_name_their_tests():
    sections = re.split(r"^## ", text_of(FOLDER / "guarantees.md"), flags=re.MULTILINE)
    proven = [section for section in sections if "**Proof.**" in section]
    assert len(proven) >= 6
    assert all(NAMED_TEST.search(section) for section in proven)


def first_column(text):
    """The names in code type at the beginning of table rows."""
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]


def settings(recipe):
    """What a recipe can be made with, apart from what it learns."""
    return {field.name for field in dataclasses.fields(recipe) if field.init} - {"curvature"}


def test_every_option_has_its_row_and_no_other():
    text = text_of(FOLDER / "options.md")
    keywords, of_the_engine = text.partition("## Clipping bounds")[0], text.partition("## Options of the engine")[2]
    of_the_engine = of_the_engine.partition("## Choosing the settings")[0]
    for table, function in ((keywords, ExpMQuadEngine.make_private_expm), (of_the_engine, ExpMQuadEngine.__init__)):
        assert sorted(first_column(table)) == sorted(set(inspect.signature(function).parameters) - {"self"})
    assert len(first_column(keywords.partition("## The keywords")[2])) <= 15


def test_every_setting_of_a_subspace_has_its_row_and_no_other():
    table = text_of(FOLDER / "options.md").partition("## Subspaces")[2].partition("## Per-sample gradients")[0]
    recipes = {Sparse, Structured, Stiefel}
    for name in first_column(table):
        assert all(name in settings(recipe) for recipe in recipes)
    assert set(first_column(table)) == set().union(*map(settings, recipes))


def test_every_module_has_its_row_and_no_other():
    package = ROOT / "opacus_expm"
    paths = [path.relative_to(package).with_suffix("") for path in package.rglob("*.py")]
    modules = {".".join(path.parts) for path in paths if not path.name.startswith("__")}
    assert sorted(first_column(text_of(FOLDER / "design.md"))) == sorted(modules)


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"([\w-]+\.md)$", text_of(ROOT / "docs" / "mkdocs.yml"), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in FOLDER.glob("*.md"))


def test_every_sharp_edge_has_its_severity_and_who_is_responsible():
    text = text_of(FOLDER / "sharp-edges.md")
    edges, severity = {}, ""
    for line, following in itertools.pairwise(line for line in text.splitlines() if line):
        if line.startswith("## "):
            severity = line[3:].partition(":")[0].lower()
        if line.startswith("### "):
            who = re.match(r"\*(.+?)\.\*", following)[1]
            edges[line[4:]] = (severity, who[0].lower() + who[1:])
    listed = {
        name: (row["severity"], row["responsible"])
        for row in tables(text, "severity", "responsible")
        for name in re.findall(r"\[(.*?)\]", row["what"])
    }
    assert listed == edges
    assert {severity for severity, _ in edges.values()} == {"severe", "serious", "mild"}


def tables(text, *columns):
    """The rows of every table that has these columns, as dictionaries."""
    rows = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        if set(columns) <= set(cells[0]):
            rows += [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
    return rows


def test_the_one_page_has_the_figures_of_the_results():
    shown = ("task", "ours, untuned", "DP-SGD, tuned for free", "DP-SGD, untuned")
    short, full = (tables(text_of(FOLDER / f"{name}.md"), *shown) for name in ("research", "results"))
    assert len(short) == 7
    assert short == [{name: row[name] for name in shown} for row in full if row["ε"] == "1"][: len(short)]


@pytest.mark.slow
def test_the_page_on_audits_has_the_figures_of_the_command():
    text = text_of(FOLDER / "audit.md")
    worst = {
        (f.adjacency, f.subject): f"{f.claimed:.3f}, {f.found:.3f}"
        for f in reversed(audit.audit_exact().findings)  # the exact one is the first of several
    }
    rows = tables(text, "worst pair found, exactly")
    assert len(rows) == 3
    for row in rows:
        subject = row["worst pair found, exactly"].replace("`", "").replace(" = ", "=")
        shown = (row[f"{name}: claimed, found"] for name in ("add/remove", "replace-one"))
        assert tuple(shown) == (worst["add_remove", subject], worst["replace_one", subject])
    learned = [f"{f.claimed:.3f}, {f.found:.3f}" for f in audit.audit_learned().findings]
    columns = ("at δ = 10⁻⁵: claimed, found", "at δ = 10⁻²: claimed, found")
    assert [row[column] for row in tables(text, *columns) for column in columns] == learned
    practice = f"privacy loss is {audit.paper_practice().findings[0].found:.1f} at a claimed ε of 1"
    assert practice in " ".join(text.split())


def test_the_version_is_one():
    cited = re.search(r"^version: (.*)$", text_of(ROOT / "CITATION.cff"), re.MULTILINE)[1]
    project = re.search(r'^version = "(.*)"$', text_of(ROOT / "pyproject.toml"), re.MULTILINE)[1]
    assert cited == project == opacus_expm.__version__


def test_the_readme_is_short():
    assert len(text_of(ROOT / "README.md").splitlines()) <= 200


# --- blocks that run -------------------------------------------------------------------------------------------------

SLOW = {"audit", "options", "results"}  # more than two seconds each
WITH_BLOCKS = [path for path in PAGES if blocks(text_of(path))]


def classes(records, features=8):
    """Records of two classes, in batches."""
    x = torch.randn(records, features)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=600)


def surroundings():
    """What the blocks take for granted: a model, its data, and what a loop has."""
    torch.manual_seed(0)
    model, loader = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)), classes(2400)
    return {
        "model": model,
        "loader": loader,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "evaluate": lambda module: float(next(module.parameters()).norm()),
    }


@pytest.fixture
def of_audit():
    """Two data sets that differ in one record, and its loss."""
    torch.manual_seed(1)
    x, y = torch.randn(21, 8), torch.zeros(21).long()
    whole, rest = (DataLoader(TensorDataset(x[:n], y[:n]), batch_size=21) for n in (21, 20))

    def canary_loss(module):
        with torch.no_grad():
            return float(nn.functional.cross_entropy(module(x[20:]), y[20:]))

    return {"loader": whole, "loader_without_one_record": rest, "canary_loss": canary_loss}


@pytest.fixture
def of_distributed(monkeypatch, tmp_path):
    """One rank, as torchrun would start it, and what another place has sent."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    names = surroundings()
    options = {"max_grad_norm": 0.8, "max_curvature": 50.0, "criterion": nn.CrossEntropyLoss()}
    part = ExpMQuadEngine().gather(names["model"], classes(600), 20, projection=Sparse(seed=7), **options)
    with pytest.warns(UserWarning, match="PRIVATE"):
        part.save_private(tmp_path / "hospital-b.private")
    yield {}
    torch.distributed.destroy_process_group()


@pytest.fixture
def of_options():
    torch.manual_seed(1)
    return {"pretraining_loader": classes(600)}


@pytest.fixture
def of_results():
    return {"loader": classes(600, features=2), "epsilon": 1.0}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW)) for path in WITH_BLOCKS],
)
def test_blocks_run_from_top_to_bottom(path, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    own = request.getfixturevalue(f"of_{path.stem}") if f"of_{path.stem}" in globals() else {}
    names = surroundings() | own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what the calls warn of is said on the page
        for code in blocks(text_of(path)):
            exec(compile(code, str(path), "exec"), names)
            for expression, value in re.findall(r"^(engine\.\w+\(.*\))  # ([\d.]+)(?:,|$)", code, re.MULTILINE):
                assert eval(expression, names) == pytest.approx(float(value), rel=1e-9)
    assert set(names) > set(surroundings() | own)
