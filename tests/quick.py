"""Which cases of a test run by default; the others carry the marker of slow tests (``pytest -m slow``)."""

import pytest


def only(quick, cases):
    """All the cases for ``parametrize``, those that are not quick with the marker; a tuple is several arguments."""
    rows = ((case, case if isinstance(case, tuple) else (case,)) for case in cases)
    return [pytest.param(*values, marks=() if case in quick else pytest.mark.slow) for case, values in rows]
