"""Pairs made of formulas, against the engine on the data made of them."""

import pytest

from opacus_expm import audit
from opacus_expm.audit import Record, Setting
from opacus_expm.mechanism import calibration


def test_the_formulas_and_the_engine_have_the_same_loss():
    """Clipped records that were ten times too large, through loader, gradients and sums, against the formulas."""
    for record, replaced in (
        (Record(1.0, 0.3, "line", 1.0), None),
        (Record(1.0, 0.3, "full"), None),
        (Record(1.0, 0.3, "none"), Record(1.0, 2.0, "line", 0.4)),
    ):
        setting = Setting(regularization=0.2, adjacency="add_remove" if replaced is None else "replace_one")
        pair = audit.Pair(setting, 7, 0.9, 3, record, replaced)
        c = calibration.calibrate(
            setting.sensitivity(), epsilon=1.0, delta=0.0, radius=0.7, regularization=0.2, nominal_size=100
        ).inverse_temperature
        observed, claimed = audit.observed_loss(*pair.data(), setting.arguments())
        assert observed.largest() == pytest.approx(pair.loss(c).largest(), rel=1e-6)
        assert claimed == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "value"), [("adjacency", "both"), ("max_grad_norm", 0.0), ("max_curvature", -1.0), ("proj_dim", 0)]
)
def test_settings_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        Setting(**{name: value})
