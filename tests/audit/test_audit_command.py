"""The audit on the command line."""

import pytest
from audited import BROKEN, SOUND

from opacus_expm import audit, cli
from opacus_expm.audit import Report


@pytest.mark.parametrize(("exact", "learned", "code"), [(SOUND, SOUND, 0), (BROKEN, SOUND, 1), (SOUND, BROKEN, 1)])
def test_command_line(exact, learned, code, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(audit, "audit_learned", lambda *args: asked.append(args) or Report((learned,)))
    monkeypatch.setattr(audit, "audit_exact", lambda *args: asked.append(args) or Report((exact,)))
    arguments = ["audit", "--epsilon", "4", "--delta", "1e-4", "--releases", "8", "--draws", "40", "--seed", "0"]
    assert cli.main(arguments) == code
    assert asked == [(4.0, 1e-4)] * 2
    captured = capsys.readouterr()
    assert captured.err == ""
    for part in (
        exact.subject,
        learned.subject,
        "ExpM-Quad, 8 releases",
        "ExpM-Quad, 40 draws",
        "Opacus DP-SGD, 8 runs",
        "bounds read off the data",
    ):
        assert part in captured.out
    assert captured.out.count("BROKEN") == 1 + code  # the paper's practice always is


def test_command_line_refuses_what_makes_no_sense(capsys):
    with pytest.raises(SystemExit):
        cli.main(["audit", "--epsilon", "-1"])
    assert "epsilon must be greater than 0" in capsys.readouterr().err
