"""Bars: on a terminal and in a notebook by default, elsewhere only if asked for."""

import sys
from types import SimpleNamespace

import pytest

from opacus_expm import ExpMQuadEngine, _bars
from tests.small_problem import make_loader, make_model


def notebook(patch, *names):
    """As in the kernel of a notebook, or in another of IPython's shells."""
    shell = SimpleNamespace(config=dict.fromkeys(names))
    patch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.mark.parametrize(
    ("names", "progress", "shown"),
    [
        (None, None, False),
        (None, True, True),
        ((), None, False),
        (("IPKernelApp",), None, True),
        (("IPKernelApp",), False, False),
    ],
)
def test_where_a_bar_is_shown(names, progress, shown, monkeypatch, capsys):
    if names is not None:
        notebook(monkeypatch, *names)
    assert list(_bars.bar(progress, range(3), desc="steps")) == [0, 1, 2]
    assert ("steps:" in capsys.readouterr().err) is shown


@pytest.mark.filterwarnings("ignore:.* can hardly be told from noise", "ignore:criterion=None")
def test_rounds_show_a_bar_in_a_notebook_without_any_argument(monkeypatch, capsys):
    notebook(monkeypatch, "IPKernelApp")
    ExpMQuadEngine().make_private_expm(make_model(), make_loader(), 1.0, delta=1e-5)
    assert "rounds:" in capsys.readouterr().err
