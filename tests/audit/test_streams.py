"""Records that are random themselves: audited for the same randomness in both data sets."""

import random

import numpy as np
import pytest
import quick
import torch
from audited import by_method, line_at_zero
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus_expm import ExpMQuadEngine, audit
from opacus_expm.audit import exact
from opacus_expm.audit.findings import synthetic_data
from opacus_expm.audit.streams import with_own_streams

RANDOM_RECORDS = 40


class _Flipped(Dataset):
    """Records (±1, y), whose sign is drawn when they are read: by a global generator, or by one that the data set holds."""

    DRAWS = {  # noqa: RUF012
        "torch": lambda self: float(torch.rand(())),
        "numpy": lambda self: np.random.rand(),
        "random": lambda self: random.random(),
        "held": lambda self: self.rng.random(),
    }

    def __init__(self, y, source):
        self.y, self.source, self.rng = y, source, np.random.default_rng(0)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        sign = 1.0 if self.DRAWS[self.source](self) < 0.5 else -1.0
        return torch.full((1,), sign, dtype=torch.float64), self.y[index]


def _plain(y):
    return TensorDataset(torch.ones_like(y), y)


def _flipped_views(x):
    return [torch.where(torch.rand(x.shape) < 0.5, x, -x)]


class _FlippingModel(nn.Module):
    """The sign again, by dropout in a functional call."""

    def __init__(self):
        super().__init__()
        self.line = line_at_zero()

    def forward(self, x):
        return self.line(torch.where(functional.dropout(torch.ones_like(x)) > 0, x, -x))


RANDOM = {
    **{source: (line_at_zero, lambda y, source=source: _Flipped(y, source), {}) for source in _Flipped.DRAWS},
    "views": (line_at_zero, _plain, {"views": _flipped_views}),
    "dropout": (_FlippingModel, _plain, {}),
}

RANDOM_ARGUMENTS = {
    "epsilon": 1.0,
    "radius": 0.3,
    "proj_dim": None,
    "criterion": nn.MSELoss(),
    "max_grad_norm": 1.0,
    "max_curvature": 0.0,
    "nominal_size": RANDOM_RECORDS,
}


def _random_pair(dataset, place, *, replaced=False):
    """Neighbours that differ in a record at a place; batches of seven."""
    y = torch.linspace(-2, 3, RANDOM_RECORDS, dtype=torch.float64)[:, None]
    other = torch.cat([y[:place], torch.full((1, 1), 5.0, dtype=torch.float64), y[place + replaced :]])
    return [DataLoader(dataset(targets), batch_size=7) for targets in (y, other)]


def _seed_everything():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def _states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def _moved(model, pair, **options):
    found = [
        ExpMQuadEngine()
        .gather(model, loader, None, criterion=nn.MSELoss(), max_grad_norm=1.0, max_curvature=0.0, **options)
        .sums.gradient
        for loader in pair
    ]
    return float((found[0] - found[1]).norm())


@pytest.mark.filterwarnings("ignore:using grad_sample_mode='functorch'")
@pytest.mark.parametrize("place", quick.only([20], [0, 20, RANDOM_RECORDS]))
@pytest.mark.parametrize("name", RANDOM)
def test_a_random_record_moves_the_sums_by_one_records_worth(name, place):
    """For any randomness that the common records keep: the claim, in a script that seeds everything; at any place."""
    model, dataset, options = RANDOM[name]
    pair, start = _random_pair(dataset, place), model()
    _seed_everything()
    before = _states()
    assert _moved(start, with_own_streams(*pair, options.get("views")), **options) <= 1 + 1e-6
    with synthetic_data():
        report = audit.audit_pair(start, *pair, {**RANDOM_ARGUMENTS, **options}, draws=10)
    assert _states() == before
    assert report.holds, report.table()
    assert by_method(report)["exact"].found > 0.1


@pytest.mark.filterwarnings("ignore:using grad_sample_mode='functorch'")
@pytest.mark.parametrize("name", quick.only(["torch"], RANDOM))
def test_passes_that_do_not_share_their_randomness_would_seem_to_move_by_more(name):
    """So that the test before this one can fail."""
    model, dataset, options = RANDOM[name]
    assert max(_moved(model(), _random_pair(dataset, 0), **options) for _ in range(12)) > 1.5


@pytest.mark.parametrize("place", [0, RANDOM_RECORDS - 1])
def test_a_replaced_random_record_is_audited_too(place):
    pair = _random_pair(RANDOM["torch"][1], place, replaced=True)
    assert _moved(line_at_zero(), with_own_streams(*pair)) <= 2 + 1e-6
    with synthetic_data():
        arguments = {**RANDOM_ARGUMENTS, "adjacency": "replace_one"}
        assert audit.audit_pair(line_at_zero(), *pair, arguments, draws=10).holds
        same = audit.audit_pair(line_at_zero(), pair[0], pair[0], arguments, draws=10)
    assert by_method(same)["exact"].found < 1e-9


def test_data_without_randomness_are_audited_as_they_come(monkeypatch):
    """In their own batches, which is where records might mix."""
    monkeypatch.setattr(exact, "with_own_streams", lambda *_: pytest.fail("nothing is random here"))
    with synthetic_data():
        pair = _random_pair(_plain, 3)
        assert audit.audit_pair(line_at_zero(), *pair, {**RANDOM_ARGUMENTS, "views": lambda x: [x, -x]}, draws=10).holds
