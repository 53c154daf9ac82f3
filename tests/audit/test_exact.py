"""The exact audit of data of the auditor's own, and what it refuses."""

import warnings

import pytest
from audited import ARGUMENTS, NOT_PRIVATE, by_method, loader_of, regression
from torch.utils.data import DataLoader, IterableDataset

from opacus_expm import GradSampling, audit


def _audit(neighbour=None, **arguments):
    model, x, y = regression()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{NOT_PRIVATE}")
        return audit.audit_pair(
            model,
            loader_of(x, y),
            loader_of(x[:-1], y[:-1]) if neighbour is None else neighbour,
            {**ARGUMENTS, **arguments},
            draws=500,
        )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"proj_dim": 3, "projection": "sparse"},
        {"proj_dim": None, "max_curvature": 0.0},
        {"proj_dim": 2, "projection": "stiefel"},
        {"delta": 1e-3, "regularization": 1.0},
        {"nominal_size": 1000},
    ],
)
def test_an_engine_is_audited_on_given_data(arguments):
    report = _audit(**arguments)
    assert report.holds, report.table()
    found = by_method(report)
    assert ("exact" in found) == ("delta" not in arguments)
    assert ("quadrature" in found) == (arguments.get("proj_dim", 2) is not None)
    if "exact" in found:
        assert 0 < found["draws"].found <= found["exact"].found
        assert found["exact"].found > 0.05


def test_a_replaced_record_is_audited_too():
    _, x, y = regression()
    other = y.clone()
    other[3] += 100
    report = _audit(loader_of(x, other), adjacency="replace_one")
    assert report.holds
    assert report.findings[0].found > 0.1
    assert _audit(loader_of(x, y), adjacency="replace_one").findings[0].found == pytest.approx(0.0, abs=1e-9)


def test_bounds_from_public_data_will_do():
    _, x, y = regression()
    assert _audit(max_grad_norm=None, max_curvature=None, public_loader=loader_of(x + 1, y)).holds


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*regression()[1:], strict=True))


BAD = {
    "epsilon is missing": ({"epsilon"}, {}, "must hold 'epsilon'"),
    "a generator": (set(), {"noise_generator": None}, "must not hold 'noise_generator'"),
    "rounds": (set(), {"rounds": 2}, "rounds must be 1"),
    "probes": (set(), {"grad_sample_mode": GradSampling(probes=2)}, "leave probes out"),
    "bought bounds": ({"max_curvature"}, {}, "needs public bounds"),
    "no neighbours": (set(), {"adjacency": "replace_one"}, "sizes must agree"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_audited_exactly_is_refused(name):
    without, extra, reason = BAD[name]
    model, x, y = regression()
    arguments = {key: value for key, value in {**ARGUMENTS, **extra}.items() if key not in without}
    with pytest.raises(ValueError, match=reason), pytest.warns(UserWarning, match=NOT_PRIVATE):
        audit.audit_pair(model, loader_of(x, y), loader_of(x[:-1], y[:-1]), arguments)


def test_data_sets_that_are_no_neighbours_are_refused():
    _, x, y = regression()
    with pytest.raises(ValueError, match="differ by one"):
        _audit(loader_of(x[:-2], y[:-2]))
    with pytest.raises(ValueError, match="known size"):
        _audit(DataLoader(_Stream(), batch_size=4))
    with pytest.raises(ValueError, match="neighbour has drop_last=True"):
        _audit(loader_of(x[:-1], y[:-1], drop_last=True))
