"""Reports."""

import dataclasses

import pytest
from audited import BROKEN, SOUND

from opacus_expm.audit import Report


def test_reports_print_what_was_found():
    report = Report((SOUND, BROKEN))
    assert not report.holds
    assert Report((SOUND,)).holds
    lines = str(report).splitlines()
    assert "0.5000" in lines[2]
    assert "holds" in lines[2]
    assert "1.500 | BROKEN" in lines[3]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SOUND.found = 0.1
