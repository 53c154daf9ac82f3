"""The search for the worst pair: sound claims hold on it and come close, and broken ones do not hold."""

import dataclasses

import pytest
from audited import NOT_PRIVATE, SOUND, by_method

from opacus_expm import audit, rounds
from opacus_expm.audit import Report, Setting, worst
from opacus_expm.mechanism import calibration

SETTINGS = {
    "range": Setting(),
    "gaussian": Setting(delta=1e-5, regularization=10.0),
}


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("name", SETTINGS)
def test_no_pair_shows_more_than_is_claimed(name, adjacency):
    report = audit.audit_worst(dataclasses.replace(SETTINGS[name], adjacency=adjacency), draws=2000)
    assert report.holds, report.table()
    found = by_method(report)
    assert found["quadrature"].ratio > (0.9 if name == "gaussian" else 0.95)
    assert found["draws"].ratio > 0.2
    claims = {f.claimed for f in report.findings}
    assert len(claims) == 1
    assert claims.pop() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("name", ["range", "gaussian"])
def test_a_temperature_a_little_too_high_is_noticed(name, monkeypatch):
    """By 1 % where the worst pair reaches the claim; by a quarter of the exponent in Gaussian terms."""
    pair = audit.worst_pair(SETTINGS[name])
    factor = 1.01 if name == "range" else 1.25
    original = calibration.calibrate_within

    def too_high(*args, **kwargs):
        found = original(*args, **kwargs)
        return dataclasses.replace(found, inverse_temperature=factor * found.inverse_temperature)

    monkeypatch.setattr(rounds, "calibrate_within", too_high)
    with pytest.warns(UserWarning, match=NOT_PRIVATE):
        report = audit.audit_pair(*pair.data(), SETTINGS[name].arguments(), draws=10)
    assert not report.holds
    assert not by_method(report)["quadrature"].holds


def test_in_many_dimensions_the_worst_pair_comes_as_close():
    found = by_method(audit.audit_worst(Setting(proj_dim=20, epsilon=0.5), draws=200))
    assert set(found) == {"exact", "draws"}
    assert 0.95 < found["exact"].ratio <= 1


def test_the_gaussian_claim_is_tight_without_curvature():
    """Far from the edge of the ball the release is a Gaussian mechanism, and nothing is given away."""
    setting = Setting(delta=1e-5, radius=20.0, max_curvature=0.0, regularization=10.0, proj_dim=1)
    found = by_method(audit.audit_worst(setting, draws=100))["quadrature"]
    assert found.ratio == pytest.approx(1.0, abs=1e-4)


def test_all_calibrations_and_adjacencies_are_in_the_table(monkeypatch):
    monkeypatch.setattr(
        worst, "audit_worst", lambda setting, seed: Report((dataclasses.replace(SOUND, adjacency=setting.adjacency),))
    )
    found = audit.audit_exact()
    assert {(f.subject.split(",")[0], f.adjacency) for f in found.findings} == {
        (calibration_, adjacency)
        for calibration_ in ("range", "gaussian")
        for adjacency in ("add_remove", "replace_one")
    }
