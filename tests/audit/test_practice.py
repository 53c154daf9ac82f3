"""Bounds read off the private data break the claim; public ones keep it."""

import pytest
import torch
from audited import NOT_PRIVATE, line_at_zero, loader_of
from torch import nn

from opacus_expm import audit, paper


def test_bounds_read_off_the_private_data_break_the_claim():
    found = audit.paper_practice(1.0).findings[0]
    assert found.claimed == 1.0
    assert found.found > 20
    assert not found.holds
    # and nothing bounds it
    assert audit.paper_practice(1.0, records=1000).findings[0].found > 200


def test_the_same_data_with_public_bounds_keep_it():
    x = torch.ones(101, 1, dtype=torch.float64)
    x[-1] = 10.0
    arguments = {
        "epsilon": 1.0,
        "radius": 1.0,
        "proj_dim": None,
        "criterion": nn.MSELoss(),
        "regularization": 0.0,
        "max_grad_norm": 1.21,
        "max_curvature": 2.42,
    }
    with pytest.warns(UserWarning, match=NOT_PRIVATE):
        report = audit.audit_pair(
            line_at_zero(), loader_of(x, -x / 2), loader_of(x[:-1], -x[:-1] / 2), arguments, draws=10
        )
    assert report.holds
    assert report.findings[0].found > 0.1


@pytest.mark.parametrize("adjacency", audit.pairs.ADJACENCIES)
def test_the_papers_temperature_spends_what_is_recorded_and_no_more(adjacency):
    """With enforced bounds the paper's calibration is private: c·W is reached by the worst pair, and never exceeded."""
    setting = audit.Setting(adjacency=adjacency)
    calibrated = paper.calibrate(setting.sensitivity(), setting.epsilon, setting.radius)
    found = audit.worst_pair(setting).loss(calibrated.inverse_temperature).largest()
    assert 0.95 * calibrated.epsilon_range < found <= calibrated.epsilon_range
    assert calibrated.epsilon_range <= setting.epsilon * (0.5 if adjacency == "add_remove" else 1.0)
