"""DP-SGD in the metric of ours: clipping and noise against a slow twin, its cost against another accountant, its search."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.suite import __main__ as suite
from benchmarks.suite import metric, ours, report, rivals
from opacus_expm import ExpMQuadEngine, tasks
from opacus_expm.experiments.journal import Journal, read_result, write_result
from opacus_expm.gathering.factors import blocks_of
from opacus_expm.learned import LearnedRounds
from opacus_expm.rule import Rule
from opacus_expm.subspaces.layout import Layout
from opacus_expm.subspaces.metric import MetricMap, Root

BOUND, NOISE, RATE, SEED = 0.05, 0.7, 0.3, 5

# --- one step, against explicit gradients ----------------------------------------------------------------------------


class Positions(nn.Module):
    """A convolution, a linear layer at every position, a norm that is in no block, and a head; one bias is frozen."""

    def __init__(self):
        super().__init__()
        self.patches, self.each = nn.Conv2d(1, 3, 2), nn.Linear(3, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)
        self.each.bias.requires_grad_(False)

    def forward(self, x):
        found = torch.relu(self.patches(x)).flatten(2).transpose(1, 2)
        return self.head(self.norm(torch.tanh(self.each(found))).mean(1))


def positive(size, generator):
    """A symmetric positive definite matrix that is far from the identity."""
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return Root(root @ root.T / size + 0.1 * torch.eye(size, dtype=torch.float64))


@pytest.fixture
def problem():
    """A small model in float64, a metric of its layers, and records."""
    torch.manual_seed(0)
    model, generator = Positions().double(), torch.Generator().manual_seed(1)
    blocks = tuple(blocks_of(model, Layout.of(model)).values())
    roots = [(positive(block.width, generator), positive(block.outputs, generator)) for block in blocks]
    x = torch.randn(7, 1, 3, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (7,), generator=generator)
    return model, MetricMap(Layout.of(model).size, blocks, roots), x, y


def dense(units):
    """The map as a matrix, column by column of each layer's Kronecker product, written out."""
    found = torch.eye(units.size, dtype=torch.float64)
    for block, (k_a, k_b) in zip(units.blocks, units.roots, strict=True):
        places = []
        for row in range(block.outputs):
            places += [block.weight + row * block.inputs + column for column in range(block.inputs)]
            places += [] if block.bias is None else [block.bias + row]
        found[np.ix_(places, places)] = torch.kron(k_b.dense(), k_a.dense())
    return found


def moved(problem, noise):
    """What one step of the optimizer under test adds to the parameters."""
    model, units, x, y = problem
    module = GradSampleModule(copy.deepcopy(model))
    trained = [p for p in module.parameters() if p.requires_grad]
    before = torch.cat([p.detach().flatten() for p in trained])
    own = DPOptimizer(
        torch.optim.SGD(trained, lr=RATE),
        noise_multiplier=noise,
        max_grad_norm=BOUND,
        expected_batch_size=len(x),
        generator=torch.Generator().manual_seed(SEED),
    )
    optimizer = metric.in_metric(module, own, units)
    nn.CrossEntropyLoss()(module(x), y).backward()
    optimizer.step()
    return torch.cat([p.detach().flatten() for p in trained]) - before


def twin(problem, noise, *, before=1, after=1):
    """The same with one backward pass a record and a dense map, applied so often before clipping and after the noise."""
    model, units, x, y = problem
    trained, map_ = [p for p in model.parameters() if p.requires_grad], dense(units)
    total = torch.zeros(units.size, dtype=torch.float64)
    clipped = 0
    for i in range(len(x)):
        gradient = torch.autograd.grad(nn.CrossEntropyLoss()(model(x[i : i + 1]), y[i : i + 1]), trained)
        row = torch.linalg.matrix_power(map_, before) @ torch.cat([g.flatten() for g in gradient])
        clipped += bool(row.norm() > BOUND)
        total += row * min(1.0, BOUND / (row.norm() + 1e-6))
    assert clipped
    generator = torch.Generator().manual_seed(SEED)
    normal = [torch.normal(0.0, noise * BOUND, p.shape, generator=generator, dtype=p.dtype) for p in trained]
    total += torch.cat([z.flatten() for z in normal]) if noise else 0
    return -RATE * torch.linalg.matrix_power(map_, after) @ total / len(x)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_a_step_clips_and_adds_noise_in_the_metric(problem, noise):
    found = moved(problem, noise)
    assert torch.allclose(found, twin(problem, noise), rtol=1e-9, atol=1e-12)
    for wrong in ({"before": 0}, {"after": 0}, {"before": 2}, {"after": 2}, {"before": 0, "after": 0}):
        assert not torch.allclose(found, twin(problem, noise, **wrong), rtol=0.05, atol=1e-6), wrong


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_opacus_itself_is_left_as_it_was(problem):
    """The rules for gradients belong to one module: another one in the same process has Opacus's own."""
    moved(problem, 0.0)
    model, _, x, y = problem
    module = GradSampleModule(copy.deepcopy(model))
    nn.CrossEntropyLoss()(module(x), y).backward()
    whole = torch.autograd.grad(nn.CrossEntropyLoss()(model(x), y), model.head.weight)[0]
    assert torch.allclose(module._module.head.weight.grad_sample.mean(0), whole)


# --- what is bought, and what it costs -------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """A made-up task with 400 records and two layers; returns it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=generator)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    task = tasks.Task(start, data, data, data, nn.CrossEntropyLoss(), name="icu", metric="accuracy")
    for module in (rivals, ours, metric):
        monkeypatch.setattr(module, "task_of", lambda name, seed: task)
    return task


def settings(rate=0.01):
    return {"learning_rate": rate, "sample_rate": 0.05, "epochs": 10}


def check_cost(epsilon, delta, run):
    """The whole of a plan by another accountant, which sees a choice as the Gaussian mechanism that dominates it.

    Raises:
        AssertionError: it costs more than ε, or much less.
    """
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    from opacus_expm.mechanism.curves import bounded_range_mu

    plan = run["plan"]
    assert set(plan["shares"]) == {"metric", "scale", "bound"}
    assert all(share["count"] == 1 for share in plan["shares"].values())
    mus = [share.get("mu") or bounded_range_mu(share["epsilon_range"]) for share in plan["shares"].values()]
    assert plan["shares"]["metric"]["mu"] > 0
    one = accounting.PoissonSampledDpEvent(plan["sample_rate"], accounting.GaussianDpEvent(plan["noise_multiplier"]))
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(accounting.GaussianDpEvent(1 / math.hypot(*mus)))
    accountant.compose(accounting.SelfComposedDpEvent(one, plan["steps"]))
    assert 0.97 * epsilon < accountant.get_epsilon(delta) <= epsilon


@pytest.mark.filterwarnings("ignore:with 400 records")  # n·ε is small
def test_a_run_buys_what_ours_buys_and_costs_its_budget(tiny):
    run = metric.run("icu", settings(), 1.0, 0, Journal(None, "suite"))
    assert 0.97 < run["charged"] <= 1
    check_cost(1.0, rivals.DELTA, run)
    assert (run["plan"]["steps"], run["plan"]["sample_rate"], run["passes"]) == (200, 1 / 20, 12)
    rule = ours.rule_of(tiny, 1.0)
    for what, event in rule.queries():
        if what in metric.BOUGHT:
            price = {"mu": event.mu} if event.mu < event.epsilon_range else {"epsilon_range": event.epsilon_range}
            assert run["plan"]["shares"][what] == pytest.approx({"count": 1, **price}, rel=1e-9)
    cheaper = copy.deepcopy(run)
    cheaper["plan"]["noise_multiplier"] *= 0.98
    with pytest.raises(AssertionError):
        check_cost(1.0, rivals.DELTA, cheaper)
    alone = copy.deepcopy(run)
    alone["plan"]["noise_multiplier"] = rivals.calibrated_noise(1.0, rivals.DELTA, 20, 10)  # nothing left to buy with
    with pytest.raises(AssertionError):
        check_cost(1.0, rivals.DELTA, alone)


@pytest.mark.filterwarnings("ignore:with 400 records")
def test_the_metric_is_the_engines_own(tiny, monkeypatch):
    """The same noise gives the map and the bound that learned rounds begin with."""
    begun = []

    def begin(self, planned):
        geometry = self.geometry(planned.bench, planned.rule, planned.blocks)
        bench = planned.bench.within(geometry.subspace)
        begun.append((bench.map, geometry.damping, self.bound(bench, planned.rule, math.sqrt(geometry.damping))))
        raise InterruptedError

    units = metric.bought(tiny, 1.0, ExpMQuadEngine(noise_generator=np.random.default_rng(3)).books())
    monkeypatch.setattr(LearnedRounds, "begin", begin)
    engine = ExpMQuadEngine(noise_generator=np.random.default_rng(3))
    loader = torch.utils.data.DataLoader(tiny.private, batch_size=ours.BATCH)
    with pytest.raises(InterruptedError):
        engine.make_private_expm(tiny.model, loader, 1.0, delta=rivals.DELTA, criterion=tiny.criterion)
    [(own, damping, bound)] = begun
    assert (units.damping, units.bound) == (damping, bound)
    vector = torch.randn(own.size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(units.metric.lift(vector), own.lift(vector))
    assert not torch.allclose(units.metric.lift(vector), vector, rtol=0.05)


@pytest.mark.filterwarnings("ignore:with 400 records")
def test_a_run_is_made_once_and_learns(tiny, tmp_path):
    first = metric.run("icu", settings(), 10.0, 0, Journal(tmp_path / "log.jsonl", "suite"))
    assert first["score"] > 85 > tiny.score(tiny.model)
    lines = (tmp_path / "log.jsonl").read_text()
    assert metric.run("icu", settings(), 10.0, 0, Journal(tmp_path / "log.jsonl", "suite")) == first
    assert (tmp_path / "log.jsonl").read_text() == lines
    again = metric.run("icu", settings(), 10.0, 0, Journal(None, "suite"))
    assert again["score"] == first["score"]  # the seed fixes the metric and the steps
    assert metric.run("icu", settings(), 10.0, 1, Journal(None, "suite"))["score"] != first["score"]


def test_a_model_without_a_metric_is_refused(tiny, monkeypatch):
    monkeypatch.setattr("opacus_expm.learned.looks.blocks", lambda bench: ())
    with pytest.raises(ValueError, match="icu must have layers that hooks can serve"):
        metric.bought(tiny, 10.0, ExpMQuadEngine(noise_generator=np.random.default_rng(3)).books())


# --- the search, the command line and the report ---------------------------------------------------------------------


def test_the_suite_keeps_the_best_rate(tmp_path, monkeypatch, capsys):
    """Of accuracies the largest mean over the searched seeds; the row says over how many it was chosen."""
    made = []

    def run(name, settings, epsilon, seed, log):
        made.append((settings["learning_rate"], seed))
        best = 0.003 if seed == 0 else 0.01
        score = 90 - abs(math.log(settings["learning_rate"] / best)) * (1.5 if seed == 0 else 1)
        return {"score": score, "seconds": 1.0, "passes": 12, "metric": "accuracy"}

    monkeypatch.setattr(metric, "run", run)
    monkeypatch.setattr(rivals, "task_of", lambda name, seed: type("Known", (), {"metric": "accuracy"}))
    arguments = ["icu", "--methods", "metric", "--epsilons", "1", "--seeds", "3", "--out", str(tmp_path)]
    suite.main([*arguments, "--searched", "2"])
    [row] = read_result(tmp_path / "icu.json")["rows"]
    assert (row["method"], row["epsilon"], row["searched"]) == ("metric", 1.0, 2)
    assert [run["settings"] for run in row["runs"]] == [settings(0.003)] * 3
    assert read_result(tmp_path / "icu.json")["grid of metric"]["learning_rate"] == list(metric.RATES)
    assert {rate for rate, _ in made} == set(metric.RATES)
    suite.main(arguments)  # two seeds outvote the first
    [row] = read_result(tmp_path / "icu.json")["rows"]
    assert [run["settings"] for run in row["runs"]] == [settings(0.01)] * 3
    assert "metric" not in suite.METHODS
    capsys.readouterr()


def made_up():
    """Results of one task at ε = 1: DP-SGD has a seed more than the metric, and ours has two."""
    scores = {"free": (70.0, 71.0, 75.0), "metric": (72.0, 74.0), "ours": (73.0, 73.5, 99.0, 99.0)}
    rows = [
        {"method": method, "epsilon": 1.0, "runs": [{"seed": i, "score": s} for i, s in enumerate(found)]}
        for method, found in scores.items()
    ]
    return {"task": "sms_head", "metric": "accuracy", "rows": rows}


def test_the_table_of_geometry_pairs_the_seeds_of_the_metric():
    (line,) = report.geometry([made_up()]).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["sms head", "1", "2"]
    assert cells[3:6] == ["70.5 ± 0.5", "73.0 ± 1.0", "73.2 ± 0.2"]
    assert cells[6:] == ["+2.50 ± 0.50", "+0.25 ± 0.75"]


def test_a_task_without_the_metric_is_not_in_that_table(tmp_path):
    without = made_up()
    without["rows"] = without["rows"][:1]
    assert len(report.geometry([without]).splitlines()) == 2
    for row in (full := made_up())["rows"]:
        for run in row["runs"]:
            run |= {"seconds": 1.0, "passes": 10}
    write_result(tmp_path / "sms_head.json", full)
    report.write(tmp_path)
    assert (tmp_path / "geometry.md").read_text(encoding="utf-8") == report.geometry([full]) + "\n"


def test_the_table_of_metrics_pairs_the_seeds_of_the_public_one():
    scores = {"ours": (73.0, 75.0, 99.0), "plain": (70.0, 71.0), "public": (74.0, 75.5)}
    rows = [
        {"method": method, "epsilon": 1.0, "runs": [{"seed": i, "score": s} for i, s in enumerate(found)]}
        for method, found in scores.items()
    ]
    (line,) = report.metrics([{"task": "sms_head", "metric": "accuracy", "rows": rows}]).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["sms head", "1", "2"]
    assert cells[3:6] == ["70.5 ± 0.5", "74.0 ± 1.0", "74.8 ± 0.8"]
    assert cells[6:] == ["+3.50 ± 0.50", "+0.75 ± 0.25"]


# --- what is stored --------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "suite"
RESULTS = [found for found in report.read(STORED) if any(row["method"] == "metric" for row in found["rows"])]


def test_the_stored_table_is_that_of_the_stored_results_and_of_the_docs():
    text = (STORED / "geometry.md").read_text(encoding="utf-8").strip()
    assert text == report.geometry(report.read(STORED))
    assert len(text.splitlines()) > 10
    page = (ROOT / "docs" / "pages" / "results.md").read_text(encoding="utf-8")
    assert text in page
    other = (STORED / "metrics.md").read_text(encoding="utf-8").strip()
    assert other == report.metrics(report.read(STORED))
    assert other in page


@pytest.mark.parametrize("found", RESULTS, ids=[found["task"] for found in RESULTS])
def test_every_stored_run_costs_its_budget(found):
    """All seeds of a row have the same plan, because it is fixed by public numbers; another accountant agrees with it."""
    public = next(row["runs"][0]["public"] for row in found["rows"] if row["method"] == "ours")
    for row in [row for row in found["rows"] if row["method"] == "metric"]:
        epsilon, runs = row["epsilon"], row["runs"]
        assert all(run["plan"] == runs[0]["plan"] for run in runs)
        assert all(0.97 * epsilon < run["charged"] <= epsilon for run in runs)
        check_cost(epsilon, found["delta"], runs[0])
        rule = Rule(epsilon, found["delta"], **public)
        plan = runs[0]["plan"]
        assert plan["shares"]["metric"]["mu"] == pytest.approx(rule.metric_mu, rel=1e-9)
        assert plan["noise_multiplier"] == pytest.approx(metric.noise_of(rule, 20, 10), rel=1e-9)
