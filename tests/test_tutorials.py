"""The tutorials as committed: executed from top to bottom, with outputs, without traces of the machine they ran on."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = (
    "1_swap_engines",
    "2_what_the_mechanism_does",
    "3_choosing_parameters",
    "4_accounting",
    "5_icu_mortality",
    "6_pretrained_transformer",
    "7_cifar10_head",
)
MACHINE = re.compile(r"(?<![\w./])/(tmp|work|root|home|Users|usr|opt|var)/|\b[A-Z]:\\\\|site-packages|ipykernel_")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def problems(notebook):
    """What is wrong with a notebook, as a list of words."""
    found = []
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    if [cell["execution_count"] for cell in code] != list(range(1, len(code) + 1)):
        found.append("not executed from top to bottom")
    if any(output["output_type"] == "error" for output in outputs):
        found.append("an error")
    if not any("image/png" in output.get("data", {}) for output in outputs):
        found.append("no figure")
    if MACHINE.search("".join(_text(output) for output in outputs)):
        found.append("a path of the machine")
    if 'quick = os.environ.get("OPACUS_EXPM_QUICK") == "1"' not in "".join(code[0]["source"]):
        found.append("no quick parameter in the first cell of code")
    if "PLACEHOLDER" in "".join("".join(cell["source"]) for cell in cells):
        found.append("unfinished text")
    return found


def _text(output):
    """All text of an output, without its pictures."""
    texts = [output.get("text", []), output.get("traceback", [])]
    texts += [value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")]
    return "".join("".join(text) if isinstance(text, list) else str(text) for text in texts)


def test_the_seven_tutorials_are_there():
    assert [path.stem for path in NOTEBOOKS] == list(NAMES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_with_sound_outputs(path):
    assert problems(json.loads(path.read_text(encoding="utf-8"))) == []
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert [target for target in LINK.findall(text) if not (FOLDER / target).exists()] == []


def sound():
    """A small notebook without problems."""
    figure = {"output_type": "display_data", "data": {"image/png": "", "text/plain": ["<Figure>"]}}
    source = ['quick = os.environ.get("OPACUS_EXPM_QUICK") == "1"']
    return {"cells": [{"cell_type": "code", "execution_count": 1, "source": source, "outputs": [figure]}]}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda cell: cell.update(execution_count=None), "not executed from top to bottom"),
        (lambda cell: cell.update(outputs=[]), "no figure"),
        (lambda cell: cell["outputs"].append({"output_type": "error", "traceback": ["ValueError"]}), "an error"),
        (
            lambda cell: cell["outputs"].append({"output_type": "stream", "text": ["at /tmp/x.py:3"]}),
            "a path of the machine",
        ),
        (
            lambda cell: cell["outputs"].append({"output_type": "stream", "text": ["lib/site-packages/x"]}),
            "a path of the machine",
        ),
        (lambda cell: cell.update(source=["quick = True"]), "no quick parameter in the first cell of code"),
        (lambda cell: cell["source"].append("PLACEHOLDER"), "unfinished text"),
    ],
)
def test_problems_are_found(change, problem):
    notebook = sound()
    assert problems(notebook) == []
    change(notebook["cells"][0])
    assert problems(notebook) == [problem]
