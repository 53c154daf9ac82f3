"""Audits: that sound mechanisms pass them, that they come close to the claims, and that broken ones do not pass."""

import dataclasses
import math
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from opacus_expm import ExpMQuadEngine, audit, cli, engine
from opacus_expm.audit import Canary, Finding, Record, Report, Setting
from opacus_expm.mechanism import calibration

NOT_PRIVATE = "report is NOT private"


def _findings(report):
    return {f.method: f for f in report.findings}


# --- the worst pairs --------------------------------------------------------------------------------------------------

SETTINGS = {
    "range": Setting(),
    "paper": Setting(calibration="paper"),
    "gaussian": Setting(calibration="gaussian", delta=1e-5, regularization=10.0),
}


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("name", SETTINGS)
def test_no_pair_shows_more_than_is_claimed(name, adjacency):
    report = audit.audit_worst(dataclasses.replace(SETTINGS[name], adjacency=adjacency), draws=2000)
    assert report.holds, report.table()
    found = _findings(report)
    assert found["quadrature"].ratio > (0.9 if name == "gaussian" else 0.95)
    assert found["draws"].ratio > 0.2
    claims = {f.claimed for f in report.findings}
    assert len(claims) == 1
    if name == "paper":  # which spends less than what was asked for
        assert claims.pop() < 0.7
    else:
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

    monkeypatch.setattr(engine, "calibrate_within", too_high)
    with pytest.warns(UserWarning, match=NOT_PRIVATE):
        report = audit.audit_pair(*pair.data(), SETTINGS[name].arguments(), draws=10)
    assert not report.holds
    assert not _findings(report)["quadrature"].holds


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


def test_in_many_dimensions_the_worst_pair_comes_as_close():
    found = _findings(audit.audit_worst(Setting(proj_dim=20, epsilon=0.5), draws=200))
    assert set(found) == {"exact", "draws"}
    assert 0.95 < found["exact"].ratio <= 1


def test_the_gaussian_claim_is_tight_without_curvature():
    """Far from the edge of the ball the release is a Gaussian mechanism, and nothing is given away."""
    setting = Setting(
        calibration="gaussian", delta=1e-5, radius=20.0, max_curvature=0.0, regularization=10.0, proj_dim=1
    )
    found = _findings(audit.audit_worst(setting, draws=100))["quadrature"]
    assert found.ratio == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "value"), [("adjacency", "both"), ("max_grad_norm", 0.0), ("max_curvature", -1.0), ("proj_dim", 0)]
)
def test_settings_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        Setting(**{name: value})


# --- data of the auditor's own ----------------------------------------------------------------------------------------


def _regression(records=12):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(records, 5, generator=generator)
    y = x.sum(1, keepdim=True) + torch.randn(records, 1, generator=generator)
    torch.manual_seed(0)
    return nn.Linear(5, 1), x, y


ARGUMENTS = {
    "epsilon": 2.0,
    "radius": 0.5,
    "proj_dim": 2,
    "criterion": nn.MSELoss(),
    "max_grad_norm": 1.0,
    "max_curvature": 1.0,
}


def _loader(x, y, **options):
    return DataLoader(TensorDataset(x, y), batch_size=5, **options)


def _audit(neighbour=None, **arguments):
    model, x, y = _regression()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{NOT_PRIVATE}")
        return audit.audit_pair(
            model,
            _loader(x, y),
            _loader(x[:-1], y[:-1]) if neighbour is None else neighbour,
            {**ARGUMENTS, **arguments},
            draws=500,
        )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"proj_dim": 3, "projection": "sparse"},
        {"proj_dim": None, "max_curvature": 0.0},
        {"clipping": "joint", "max_curvature": None},
        {"delta": 1e-3, "regularization": 1.0},
        {"nominal_size": 1000},
    ],
)
def test_an_engine_is_audited_on_given_data(arguments):
    report = _audit(**arguments)
    assert report.holds, report.table()
    found = _findings(report)
    assert ("exact" in found) == ("delta" not in arguments)
    assert ("quadrature" in found) == (arguments.get("proj_dim", 2) is not None)
    if "exact" in found:
        assert 0 < found["draws"].found <= found["exact"].found
        assert found["exact"].found > 0.05


def test_a_replaced_record_is_audited_too():
    _, x, y = _regression()
    other = y.clone()
    other[3] += 100
    report = _audit(_loader(x, other), adjacency="replace_one")
    assert report.holds
    assert report.findings[0].found > 0.1
    assert _audit(_loader(x, y), adjacency="replace_one").findings[0].found == pytest.approx(0.0, abs=1e-9)


def test_bounds_from_public_data_will_do():
    _, x, y = _regression()
    assert _audit(max_grad_norm=None, max_curvature=None, public_loader=_loader(x + 1, y)).holds


def test_an_audit_warns_that_its_report_is_not_private():
    model, x, y = _regression()
    pair = (model, _loader(x, y), _loader(x[:-1], y[:-1]))
    with pytest.warns(UserWarning, match=r"audit_pair\(\).*" + NOT_PRIVATE):
        audit.audit_pair(*pair, ARGUMENTS, draws=10)
    with pytest.warns(UserWarning, match=r"black_box\(\).*" + NOT_PRIVATE):
        audit.black_box(*pair, ARGUMENTS, lambda m: 0.0, releases=4)
    datasets = (TensorDataset(x, y), TensorDataset(x, y + 1))
    with pytest.warns(UserWarning, match=r"black_box_dp_sgd\(\).*" + NOT_PRIVATE):
        audit.black_box_dp_sgd(
            model, *datasets, nn.MSELoss(), Canary(silent=11).dp_sgd_arguments(1.0, 1e-5), lambda m: 0.0, releases=4
        )


# --- records that are random themselves -----------------------------------------------------------------------------------

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
        self.line = _line_at_zero()

    def forward(self, x):
        return self.line(torch.where(functional.dropout(torch.ones_like(x)) > 0, x, -x))


def _line_at_zero():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


RANDOM = {
    **{source: (_line_at_zero, lambda y, source=source: _Flipped(y, source), {}) for source in _Flipped.DRAWS},
    "views": (_line_at_zero, _plain, {"views": _flipped_views}),
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
@pytest.mark.parametrize("place", [0, 20, RANDOM_RECORDS])
@pytest.mark.parametrize("name", RANDOM)
def test_a_random_record_moves_the_sums_by_one_records_worth(name, place):
    """For any randomness that the common records keep: the claim, in a script that seeds everything; at any place."""
    model, dataset, options = RANDOM[name]
    pair, start = _random_pair(dataset, place), model()
    _seed_everything()
    before = _states()
    assert _moved(start, audit._with_own_streams(*pair, options.get("views")), **options) <= 1 + 1e-6
    with audit._synthetic_data():
        report = audit.audit_pair(start, *pair, {**RANDOM_ARGUMENTS, **options}, draws=10)
    assert _states() == before
    assert report.holds, report.table()
    assert _findings(report)["exact"].found > 0.1


@pytest.mark.filterwarnings("ignore:using grad_sample_mode='functorch'")
@pytest.mark.parametrize("name", RANDOM)
def test_passes_that_do_not_share_their_randomness_would_seem_to_move_by_more(name):
    """So that the test before this one can fail."""
    model, dataset, options = RANDOM[name]
    assert max(_moved(model(), _random_pair(dataset, 0), **options) for _ in range(12)) > 1.5


@pytest.mark.parametrize("place", [0, RANDOM_RECORDS - 1])
def test_a_replaced_random_record_is_audited_too(place):
    pair = _random_pair(RANDOM["torch"][1], place, replaced=True)
    assert _moved(_line_at_zero(), audit._with_own_streams(*pair)) <= 2 + 1e-6
    with audit._synthetic_data():
        arguments = {**RANDOM_ARGUMENTS, "adjacency": "replace_one"}
        assert audit.audit_pair(_line_at_zero(), *pair, arguments, draws=10).holds
        same = audit.audit_pair(_line_at_zero(), pair[0], pair[0], arguments, draws=10)
    assert _findings(same)["exact"].found < 1e-9


def test_data_without_randomness_are_audited_as_they_come(monkeypatch):
    """In their own batches, which is where records might mix."""
    monkeypatch.setattr(audit, "_with_own_streams", lambda *_: pytest.fail("nothing is random here"))
    with audit._synthetic_data():
        pair = _random_pair(_plain, 3)
        assert audit.audit_pair(
            _line_at_zero(), *pair, {**RANDOM_ARGUMENTS, "views": lambda x: [x, -x]}, draws=10
        ).holds


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*_regression()[1:], strict=True))


BAD = {
    "epsilon is missing": ({"epsilon"}, {}, "must hold 'epsilon'"),
    "a sampler": (set(), {"sampler": "gibbs"}, "must not hold 'sampler'"),
    "rounds": (set(), {"rounds": 2}, "rounds must be 1"),
    "probes": (set(), {"curvature_samples": 2}, "leave curvature_samples out"),
    "bought bounds": ({"max_curvature"}, {}, "needs public bounds"),
    "no neighbours": (set(), {"adjacency": "replace_one"}, "sizes must agree"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_audited_exactly_is_refused(name):
    without, extra, reason = BAD[name]
    model, x, y = _regression()
    arguments = {key: value for key, value in {**ARGUMENTS, **extra}.items() if key not in without}
    with pytest.raises(ValueError, match=reason), pytest.warns(UserWarning, match=NOT_PRIVATE):
        audit.audit_pair(model, _loader(x, y), _loader(x[:-1], y[:-1]), arguments)


def test_data_sets_that_are_no_neighbours_are_refused():
    _, x, y = _regression()
    with pytest.raises(ValueError, match="differ by one"):
        _audit(_loader(x[:-2], y[:-2]))
    with pytest.raises(ValueError, match="known size"):
        _audit(DataLoader(_Stream(), batch_size=4))
    with pytest.raises(ValueError, match="neighbour has drop_last=True"):
        _audit(_loader(x[:-1], y[:-1], drop_last=True))


# --- the statistical bound --------------------------------------------------------------------------------------------


def _randomized_response(epsilon, count, seed):
    """Answers of two worlds, truth kept with probability e^ε/(1 + e^ε)."""
    random = np.random.default_rng(seed)
    truth = 1 / (1 + math.exp(-epsilon))
    return (random.random(count) < truth).astype(float), (random.random(count) > truth).astype(float)


def test_randomized_response_is_bounded_from_below_and_closely():
    bounds = [audit.lower_bound(*_randomized_response(1.0, 20_000, seed)) for seed in range(40)]
    assert min(bounds) > 0.9
    assert sum(b > 1.0 for b in bounds) <= 4  # 2 expected at the most; P(more than 6) < 1e-2
    # a mechanism with a little more than it claims is found out
    assert min(audit.lower_bound(*_randomized_response(1.2, 20_000, seed)) for seed in range(10)) > 1.0


def test_equal_worlds_are_not_told_apart():
    random = np.random.default_rng(0)
    bounds = [audit.lower_bound(random.random(2000), random.random(2000)) for _ in range(40)]
    assert sum(b > 0 for b in bounds) <= 5


def test_delta_is_taken_off_the_event():
    """A mechanism that names its data set with probability 0.05, and says nothing else."""
    random = np.random.default_rng(0)
    first, second = random.random(8000), random.random(8000)
    first[random.random(8000) < 0.05] = 2.0
    assert audit.lower_bound(first, second) > 3
    assert audit.lower_bound(first, second, delta=0.06) < 0.2


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (np.zeros(3), np.zeros(9), "at least 4 scores"),
        (np.zeros((9, 2)), np.zeros(9), "one dimension"),
        (np.full(9, np.nan), np.zeros(9), "finite scores"),
    ],
)
def test_scores_that_cannot_be_used(first, second, reason):
    with pytest.raises(ValueError, match=reason):
        audit.lower_bound(first, second)


# --- black boxes ------------------------------------------------------------------------------------------------------


def _canary_audit(epsilon, *, canary=True, seed=0, **options):
    bird = Canary()
    without, with_it = bird.loaders()
    arguments = {**bird.arguments(epsilon), "noise_generator": np.random.default_rng(seed)}
    with pytest.warns(UserWarning, match=NOT_PRIVATE):
        report = audit.black_box(
            bird.model(), without, with_it if canary else without, arguments, bird.score, **options
        )
    return report.findings[0]


def test_black_box_comes_half_way_to_a_pure_epsilon_of_one():
    """With 25,000 draws bounds scatter by 0.06 around 0.5, with 80,000, as on the command line, by 0.03 around 0.57."""
    found = _canary_audit(1.0, releases=25_000, draws_per_pass=12_500, seed=2)
    assert found.claimed == 1.0
    assert 0.5 <= found.found <= 1.0


def test_black_box_of_whole_releases():
    found = _canary_audit(8.0, releases=250)
    assert found.claimed == 8.0
    assert 1.0 < found.found <= 8.0
    assert _canary_audit(8.0, releases=60, canary=False).found < 0.5


def test_black_box_says_what_a_ledger_at_another_delta_states():
    bird = Canary()
    arguments = {**bird.arguments(1.0), "delta": 1e-5, "regularization": 100.0, "calibration": "gaussian"}
    with pytest.warns(UserWarning, match=NOT_PRIVATE):
        report = audit.black_box(
            bird.model(), *bird.loaders(), arguments, bird.score, releases=400, draws_per_pass=400, delta=0.01
        )
    engine_ = ExpMQuadEngine()
    engine_.make_private_expm(bird.model(), bird.loaders()[0], **arguments)
    assert report.findings[0].claimed == engine_.get_epsilon(0.01) < 1.0
    assert report.findings[0].delta == 0.01
    assert report.holds


def test_many_draws_need_passes_without_randomness():
    model, x, y = _regression()
    pair = (model, _loader(x, y), _loader(x[:-1], y[:-1]))
    with pytest.raises(ValueError, match="draws_per_pass=1"), pytest.warns(UserWarning, match=NOT_PRIVATE):
        audit.black_box(*pair, ARGUMENTS, lambda m: 0.0, releases=10, draws_per_pass=5)


def test_opacus_is_audited_in_the_same_way():
    bird = Canary()
    with pytest.warns(UserWarning, match=NOT_PRIVATE):
        report = audit.black_box_dp_sgd(
            bird.model(),
            *bird.datasets(),
            nn.MSELoss(),
            bird.dp_sgd_arguments(8.0, 1e-5),
            bird.score,
            releases=120,
            seed=0,
        )
    assert 0.5 < report.findings[0].found <= report.findings[0].claimed == 8.0
    first, second = bird.datasets()
    with pytest.raises(ValueError, match="same number of records"), pytest.warns(UserWarning, match=NOT_PRIVATE):
        audit.black_box_dp_sgd(
            bird.model(),
            TensorDataset(first.tensors[0][:1], first.tensors[1][:1]),
            second,
            nn.MSELoss(),
            {},
            bird.score,
        )


# --- the source paper's practice --------------------------------------------------------------------------------------


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
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    arguments = {
        "epsilon": 1.0,
        "radius": 1.0,
        "proj_dim": None,
        "criterion": nn.MSELoss(),
        "regularization": 0.0,
        "max_grad_norm": 1.21,
        "max_curvature": 2.42,
        "calibration": "paper",
    }
    with pytest.warns(UserWarning, match=NOT_PRIVATE):
        report = audit.audit_pair(model, _loader(x, -x / 2), _loader(x[:-1], -x[:-1] / 2), arguments, draws=10)
    assert report.holds
    assert report.findings[0].found > 0.1


# --- reports and the command line -------------------------------------------------------------------------------------

SOUND = Finding("sound", "exact", "add_remove", 1.0, 0.0, 1.0, 0.5)
BROKEN = Finding("broken", "exact", "add_remove", 1.0, 0.0, 1.0, 1.5)


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


@pytest.mark.parametrize(("exact", "code"), [(SOUND, 0), (BROKEN, 1)])
def test_command_line(exact, code, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(audit, "audit_exact", lambda *args: asked.append(args) or Report((exact,)))
    arguments = ["audit", "--epsilon", "4", "--delta", "1e-4", "--releases", "8", "--draws", "40", "--seed", "0"]
    assert cli.main(arguments) == code
    assert asked == [(4.0, 1e-4)]
    captured = capsys.readouterr()
    assert captured.err == ""
    for part in (
        exact.subject,
        "ExpM-Quad, 8 releases",
        "ExpM-Quad, 40 draws",
        "Opacus DP-SGD, 8 runs",
        "bounds='paper'",
    ):
        assert part in captured.out
    assert captured.out.count("BROKEN") == 1 + code  # the paper's practice always is


def test_command_line_refuses_what_makes_no_sense(capsys):
    with pytest.raises(SystemExit):
        cli.main(["audit", "--epsilon", "-1"])
    assert "epsilon must be greater than 0" in capsys.readouterr().err


def test_all_calibrations_and_adjacencies_are_in_the_table(monkeypatch):
    monkeypatch.setattr(
        audit, "audit_worst", lambda setting, seed: Report((dataclasses.replace(SOUND, adjacency=setting.adjacency),))
    )
    found = audit.audit_exact()
    assert {(f.subject.split(",")[0], f.adjacency) for f in found.findings} == {
        (calibration_, adjacency)
        for calibration_ in ("range", "paper", "gaussian")
        for adjacency in ("add_remove", "replace_one")
    }
