"""One record moves the sums by one record's worth, whatever the model does with its batch or with itself."""

import itertools
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, audit
from opacus_expm.gathering.independence import DependentRecords, State, check_mixing, may_branch, outputs_alone

C_G, FEATURES = 0.01, 4


class Wrapped(nn.Module):
    """A small network with something done to its inputs first."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x):
        return self.net(self.first(x))

    def first(self, x):
        return x


# --- through the batch ----------------------------------------------------------------------------------------------


class Rescaled(Wrapped):
    def first(self, x):
        return x / 255 if x.max() > 1.5 else x


class Cautious(Wrapped):
    def first(self, x):
        return x if torch.isfinite(x).all() else torch.zeros_like(x)


class Shifted(Wrapped):
    def first(self, x):
        return -x if (x < -6).any() else x


class Scanned(Wrapped):
    def first(self, x):
        return x.cumsum(0)


class SlightlyCentred(Wrapped):
    def first(self, x):
        return x + 1e-3 * x.mean(0)


class GradientsMixed(Wrapped):
    """Outputs do not depend on the batch, gradients do."""

    def forward(self, x):
        f = self.net(x)
        return f + (f.mean(0) - f.mean(0).detach())


class Rarely(Wrapped):
    """A branch that no synthetic record takes."""

    def first(self, x):
        return -x if (x == 3.14159).any() else x


class Counted(Wrapped):
    """Reads a number, not a condition."""

    def first(self, x):
        return -x if int((x > 3e6).sum()) else x


class EarlyExit(Wrapped):
    """A layer that is called for some batches only."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.more = nn.Linear(FEATURES, FEATURES)

    def first(self, x):
        return self.more(x) if x.max() > 1.5 else x


class BehindTorch(Wrapped):
    """Reads values without torch's dispatcher."""

    def first(self, x):
        return -x if 3.14159 in x.detach().numpy() else x


THROUGH_THE_BATCH = [
    (Rescaled, 100.0), (Cautious, np.nan), (Shifted, -7.0), (Scanned, 50.0), (SlightlyCentred, 1e6), (Rarely, 3.14159),
    (Counted, 4e6), (BehindTorch, 3.14159), (EarlyExit, 100.0),
]  # fmt: skip


# --- through state --------------------------------------------------------------------------------------------------


class RunningBuffer(Wrapped):
    """A buffer that forward changes in place, in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(FEATURES))

    def first(self, x):
        self.running.mul_(0.5).add_(x.detach().mean(0))
        return x + self.running


class Remembering(Wrapped):
    """An attribute that holds the last record."""

    last = 0.0

    def first(self, x):
        shifted = x + self.last
        self.last = x.detach().sum()
        return shifted


class Collecting(Wrapped):
    """A list that grows."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def first(self, x):
        self.seen.append(float(x.detach().sum()))
        return x + sum(self.seen)


class Counting(Wrapped):
    """A counter of large records, which changes what is done from then on."""

    def __init__(self):
        super().__init__()
        self.large = torch.zeros(())

    def first(self, x):
        self.large = self.large + (x.detach() > 2).sum()
        return x * torch.where(self.large > 3, -1.0, 1.0)


THROUGH_STATE = [(RunningBuffer, 1e3), (Remembering, 1e3), (Collecting, 1e3), (Counting, 10.0)]


# --- what one record moves ------------------------------------------------------------------------------------------


def records(count=60, value=None):
    """Plain records between 0 and 1, and one more with the given value among them."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(count, FEATURES, generator=generator), torch.randint(2, (count,), generator=generator)
    if value is not None:
        # First, so that whatever it leaves behind reaches all the others.
        x, y = torch.cat([torch.full((1, FEATURES), value), x]), torch.cat([y[:1], y])
    return DataLoader(TensorDataset(x, y), batch_size=16)


def sums(model, loader, **options):
    return ExpMQuadEngine().gather(
        model, loader, None, criterion=nn.CrossEntropyLoss(), max_grad_norm=C_G, max_curvature=0.0, **options
    ).sums.gradient  # fmt: skip


def moved(model, value, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        without, with_it = (sums(model(), records(value=v), **options) for v in (None, value))
    return float((with_it - without).norm()) / C_G


@pytest.mark.parametrize(
    ("model", "value"), [*THROUGH_THE_BATCH, *THROUGH_STATE], ids=lambda v: getattr(v, "__name__", "")
)
@pytest.mark.parametrize("mode", [None, "functorch"])
def test_one_record_moves_the_sums_by_one_records_worth(model, value, mode):
    assert moved(model, value, grad_sample_mode=mode) <= 1 + 1e-6


def test_a_head_of_zeros_hides_nothing():
    # Outputs are the same whatever the batch does to them; gradients are not.
    def blank():
        model = Shifted()
        nn.init.zeros_(model.net[2].weight)
        return model

    assert moved(blank, -7.0) <= 1 + 1e-6


@pytest.mark.parametrize(("model", "value"), THROUGH_THE_BATCH, ids=lambda v: getattr(v, "__name__", ""))
def test_without_the_check_the_record_moves_more(model, value, monkeypatch):
    # The cases are worth something: they go wrong where nobody looks.
    monkeypatch.setattr("opacus_expm.gathering.hooks.check_mixing", lambda *_, **__: None)
    assert moved(model, value) > 1.5


@pytest.mark.parametrize(("model", "value"), THROUGH_STATE, ids=lambda v: getattr(v, "__name__", ""))
def test_without_putting_back_the_record_moves_more(model, value, monkeypatch):
    monkeypatch.setattr(
        "opacus_expm.gathering.rows.State", lambda *_: SimpleNamespace(changed=[], restore=lambda: None)
    )
    monkeypatch.setattr("opacus_expm.gathering.hooks.may_branch", lambda *_: False)
    for check in ("_probe", "check_mixing"):
        monkeypatch.setattr(f"opacus_expm.gathering.hooks.{check}", lambda *_, **__: None)
    assert moved(model, value, grad_sample_mode="hooks") > 1.2


@pytest.mark.parametrize("model", [model for model, _ in THROUGH_THE_BATCH] + [GradientsMixed])
def test_a_dependent_model_runs_record_by_record_and_says_so(model):
    reason = "depend on the other records|branches on values|reads values|depends on the values"
    with pytest.warns(UserWarning, match=f"using grad_sample_mode='functorch', because .*({reason})"):
        sums(model(), records())
    with pytest.raises(ValueError, match=f"grad_sample_mode='hooks' cannot serve this model: .*({reason})"):
        sums(model(), records(), grad_sample_mode="hooks")


@pytest.mark.parametrize(
    ("model", "name"), [(RunningBuffer, "running"), (Remembering, "last"), (Collecting, "seen"), (Counting, "large")]
)
def test_state_is_put_back_aloud(model, name):
    with pytest.warns(UserWarning, match=f"model changes {name} in its forward pass"):
        sums(model(), records(), grad_sample_mode="functorch")


def test_state_out_of_sight_is_refused():
    box = []

    class Elsewhere(Wrapped):
        def first(self, x):
            box.append(float(x.sum()))
            return x + sum(box)

    with pytest.raises(ValueError, match="other outputs for the same record after another one"):
        sums(Elsewhere(), records())


class NothingToSay(Wrapped):
    """Keeps a trace that changes nothing, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.trace = None

    def first(self, x):
        self.trace = x.detach()
        return F.dropout(x, 0.5, training=True)


def test_random_models_are_not_taken_for_dependent_ones():
    with pytest.warns(UserWarning, match="model changes trace in") as said:
        sums(NothingToSay(), records(), grad_sample_mode="functorch")
    assert len(said) == 1
    check_mixing(outputs_alone(NothingToSay().eval()), torch.zeros(1, FEATURES), branches=False)
    with pytest.raises(DependentRecords):
        check_mixing(outputs_alone(Rescaled().eval()), torch.zeros(1, FEATURES), branches=True)


@pytest.mark.parametrize("model", [NothingToSay, Rescaled, Counting])
def test_the_check_leaves_random_streams_alone(model):
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(2), np.random.rand(2), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    example = torch.zeros(1, FEATURES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = model().eval()
        state = State(module, example)
        branches = may_branch(outputs_alone(module), example)
        state.restore()
        try:
            check_mixing(outputs_alone(module), example, branches=branches)
        except DependentRecords:
            assert model is not NothingToSay
    assert torch.equal(torch.rand(2), expected[0])
    assert np.array_equal(np.random.rand(2), expected[1])
    assert random.random() == expected[2]


class MaskedMean(nn.Module):
    """Skips a mask that masks nothing, as Hugging Face's models do; ``wrong`` skips it with a difference."""

    def __init__(self, wrong=0.0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(20, 3), nn.Linear(3, 2)
        self.wrong = wrong

    def forward(self, ids, mask):
        x = self.embed(ids)
        if mask.all():
            return self.head(x.mean(1) + self.wrong)
        weights = mask[..., None].to(x)
        return self.head((x * weights).sum(1) / weights.sum(1).clamp(min=1))


def test_a_branch_that_was_seen_both_ways_is_harmless():
    example = {"ids": torch.zeros(1, 5, dtype=torch.long), "mask": torch.zeros(1, 5, dtype=torch.long)}
    run = outputs_alone(MaskedMean())
    assert may_branch(run, example)
    check_mixing(run, example, branches=True)
    with pytest.raises(DependentRecords, match="depend on the other records"):
        check_mixing(outputs_alone(MaskedMean(wrong=1e-3)), example, branches=True)


def test_nothing_but_shapes_and_types_is_taken_from_the_first_batch():
    seen = []

    def run(inputs):
        seen.append(inputs)
        return [inputs["x"].sum(1), inputs["k"].sum(1)]

    def probed(example):
        seen.clear()
        check_mixing(run, example, branches=may_branch(run, example))
        return [t for inputs in seen for t in inputs.values() if not torch._C._functorch.is_batchedtensor(t)]

    zeros = {"x": torch.zeros(1, 3), "k": torch.zeros(1, 2, dtype=torch.long)}
    strange = {"x": torch.full((1, 3), torch.nan), "k": torch.full((1, 2), 12345)}
    for a, b in itertools.zip_longest(probed(zeros), probed(strange)):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("values", [0.0, 1.0, 255.0])
def test_a_threshold_in_any_public_range_is_found(values):
    # A branch on the mean of a batch, somewhere in one of the ranges, seen because a neighbour can cross it.
    def run(inputs):
        return [torch.where(inputs.mean() > values * 0.4, inputs, -inputs)]

    assert not may_branch(run, torch.zeros(1, FEATURES))  # it is no branch of the program
    with pytest.raises(DependentRecords):
        check_mixing(run, torch.zeros(1, FEATURES), branches=False)


@pytest.mark.parametrize("weight", [1e-3, 1e-6, 1e-9])
def test_small_shares_of_other_records_are_found(weight):
    with pytest.raises(DependentRecords):
        check_mixing(lambda x: [x + weight * x.mean(0)], torch.zeros(1, FEATURES), branches=False)


def test_token_ids_are_tried_as_far_as_the_model_takes_them():
    embed = nn.Embedding(150, 2)
    largest = 0

    def run(ids):
        nonlocal largest
        found = [embed(ids).sum(1)]
        largest = max(largest, int(ids.max()))
        return found

    check_mixing(run, torch.zeros(1, 6, dtype=torch.long), branches=False)
    assert 50 < largest < 100


def test_views_that_mix_records_are_refused():
    def mixed(x):
        return [x, 0.5 * x + 0.5 * x.flip(0)]

    with pytest.raises(ValueError, match="views must treat every record alone"):
        sums(Wrapped(), records(), views=mixed)
    with pytest.raises(ValueError, match="views must treat every record alone"):
        sums(Wrapped(), records(), views=lambda x: [x / 255 if x.max() > 1.5 else x])
    sums(Wrapped(), records(), views=lambda x: [x, x + 0.1 * torch.randn_like(x)])


@pytest.mark.parametrize("model", [Rescaled, Scanned, RunningBuffer])
def test_the_audit_finds_no_more_than_is_claimed(model):
    value = dict([*THROUGH_THE_BATCH, *THROUGH_STATE])[model]
    arguments = {
        "epsilon": 1.0, "radius": 1.0, "proj_dim": None, "criterion": nn.CrossEntropyLoss(), "max_grad_norm": C_G,
        "max_curvature": 0.0, "regularization": 0.0,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = audit.audit_pair(model(), records(), records(value=value), arguments, draws=2)
    assert all(f.holds for f in report.findings if f.method != "draws"), report.table()
