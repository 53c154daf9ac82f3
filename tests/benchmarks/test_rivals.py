"""DP-SGD's three forms: what tuning costs, against exact divergences and another accountant; what is chosen, and resumed."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import quick
import torch
from scipy import integrate, stats
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.suite import rivals
from benchmarks.suite.selection import ORDERS, Trials, dp_sgd_rdp, epsilon_of
from benchmarks.suite.trials import LAWS, expected_best
from benchmarks.suite.trials import main as compare_laws
from opacus_expm import tasks
from opacus_expm.baselines import calibrated_noise
from opacus_expm.experiments.journal import Journal

SHAPES = (0.0, 0.5, 1.0, 3.0, math.inf)

# --- what it costs to keep the best ----------------------------------------------------------------------------------


def probabilities(trials, count=4000):
    """Of the numbers of runs 0, 1, 2, ..., written out."""
    k = np.arange(count)
    if trials.shape == math.inf:
        return stats.poisson.pmf(k, trials.mean)
    if trials.shape == 0:
        return np.where(k > 0, stats.logser.pmf(np.maximum(k, 1), 1 - trials.gamma), 0.0)
    found = np.where(k > 0, stats.nbinom.pmf(k, trials.shape, trials.gamma), 0.0)
    return found / found.sum()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.5, 10.0])
def test_the_number_of_trials_has_its_mean_and_its_law(shape, mean):
    trials = Trials(mean, shape)
    expected = probabilities(trials)
    assert expected @ np.arange(len(expected)) == pytest.approx(mean, rel=1e-6)
    generator = np.random.default_rng(0)
    drawn = np.array([trials.draw(generator) for _ in range(3000)])

    def pvalue(law):
        edge = 1 + int(np.flatnonzero(np.cumsum(law) < 0.95).max(initial=1))
        counts = np.bincount(np.minimum(drawn, edge), minlength=edge + 1)
        wanted = np.append(law[:edge], 1 - law[:edge].sum()) * len(drawn)
        used = wanted > 0
        assert counts[~used].sum() == 0
        return stats.chisquare(counts[used], wanted[used]).pvalue

    assert pvalue(expected) > 1e-3
    assert pvalue(probabilities(Trials(1.5 * mean, shape))) < 1e-3  # the control must fail


def test_the_geometric_law_is_the_shape_one():
    assert Trials(10.0, 1.0).gamma == pytest.approx(0.1)


def renyi(p, q, orders):
    """Of one binary distribution from another, P(1) = p and q, in the worse direction."""
    found = []
    for first, second in (((p, 1 - p), (q, 1 - q)), ((q, 1 - q), (p, 1 - p))):
        terms = np.array([order * np.log(first) - (order - 1) * np.log(second) for order in orders])
        found.append(np.logaddexp.reduce(terms, axis=1) / (orders - 1))
    return np.max(found, axis=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [2.0, 10.0])
def test_the_bound_holds_for_a_mechanism_whose_divergence_is_known(shape, mean):
    """One run says 1, the better result, with probability p or p′; the best of K says 1 unless all say 0."""
    trials = Trials(mean, shape)
    law = probabilities(trials)
    exceeded = False
    for p in (0.01, 0.1, 0.5, 0.9):
        for ratio in (1.02, 1.3):
            q = p / ratio
            best = [float(1 - law @ (1 - x) ** np.arange(len(law))) for x in (p, q)]
            single, exact = renyi(p, q, ORDERS), renyi(*best, ORDERS)
            assert (exact <= trials.rdp(single) + 1e-9).all()
            exceeded |= bool((exact > single + 1e-6).any())
    assert exceeded  # without the charge the bound would be wrong


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("noise", "steps", "epochs"), [(1.2, 20, 10), (3.0, 20, 10), (40.0, 20, 10), (8.0, 1, 20)])
def test_the_bound_is_the_one_of_another_accountant(shape, noise, steps, epochs):
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import RdpAccountant

    one = accounting.PoissonSampledDpEvent(1 / steps, accounting.GaussianDpEvent(noise))
    event = accounting.dp_event.RepeatAndSelectDpEvent(accounting.SelfComposedDpEvent(one, steps * epochs), 10.0, shape)
    accountant = RdpAccountant(ORDERS.tolist())
    accountant.compose(event)
    ours = epsilon_of(Trials(10.0, shape).rdp(dp_sgd_rdp(noise, steps, epochs)), 1e-5)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


@pytest.mark.parametrize("noise", [0.7, 1.2])
@pytest.mark.parametrize("order", [1.1, 1.3, 2.0, 5.0])
def test_the_curve_of_one_run_is_its_integral(noise, order):
    """Also at the low orders where the other accountant gives up."""
    rate = 1 / 20

    def integrand(x):
        ratio = 1 - rate + rate * math.exp((2 * x - 1) / (2 * noise**2))
        return stats.norm.pdf(x, scale=noise) * ratio**order

    value, _ = integrate.quad(integrand, -15 * noise, 15 * noise + 2 * order, points=[0, 1, order], epsabs=1e-13)
    [found] = dp_sgd_rdp(noise, 20, 3)[np.isclose(ORDERS, order)]
    assert found == pytest.approx(60 * math.log(value) / (order - 1), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 1.0), "mean must be greater than 1, got 1.0"),
        ((-2.0, 1.0), "mean must be greater than 0, got -2.0"),
        ((2.0, -0.5), "shape must be 0 or greater, or math.inf, got -0.5"),
        ((2.0, math.nan), "shape must be 0 or greater, or math.inf, got nan"),
    ],
)
def test_trials_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Trials(*arguments)


@pytest.mark.parametrize("epsilon", quick.only([1.0], [0.1, 1.0, 10.0]))
def test_what_is_kept_costs_no_more_than_the_budget(epsilon):
    schedules = ((1, 20), (20, 10))
    each = rivals.charged_epsilon(epsilon, 1e-5, schedules, rivals.TRIALS)

    def cost(single):
        curves = [dp_sgd_rdp(calibrated_noise(single, 1e-5, *schedule), *schedule) for schedule in schedules]
        return epsilon_of(rivals.TRIALS.rdp(np.max(curves, axis=0)), 1e-5)

    assert cost(each) <= epsilon
    assert cost(1.04 * each) > epsilon  # and nothing is wasted
    assert each < epsilon / 1.3


# --- the rivals ------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch):
    """A task whose score is the learning rate that was used, near 0.1 the better; returns what DP-SGD was called with."""
    x = torch.zeros(200, 1)
    data = TensorDataset(x, torch.zeros(200, 1))

    class Known(tasks.Task):
        def score(self, model):
            return float(model.weight.detach()) if self.metric == "accuracy" else -float(model.weight.detach())

    calls = []

    def train(model, dataset, criterion, **options):
        calls.append(options)
        trained = nn.Linear(1, 1)
        rate = options["learning_rate"]
        value = math.nan if rate > 0.5 else 90 - abs(math.log(rate / 0.1)) + 1e-9 * (options["seed"] % 97)
        nn.init.constant_(trained.weight, value)
        return trained

    def task(name, seed):
        start = nn.Linear(1, 1)
        nn.init.constant_(start.weight, 50.0)
        metric = "loss" if name == "sine" else "accuracy"
        return Known(start, data, data, data, nn.MSELoss(), name=name, metric=metric)

    monkeypatch.setattr(rivals, "dp_sgd", train)
    monkeypatch.setattr(rivals, "task_of", task)
    return calls


@pytest.mark.parametrize(("name", "sign"), [("icu", 1), ("sine", -1)])
def test_tuned_for_free_is_the_best_of_the_grid(trained, tmp_path, name, sign):
    """Of accuracies the largest and of losses the smallest; what diverged is never chosen."""
    log = Journal(tmp_path / "log.jsonl", "suite")
    found = rivals.free(name, 1.0, 3, log, searched=[0, 1])
    assert found["settings"]["learning_rate"] == 0.1
    assert found["score"] == pytest.approx(sign * 90)
    assert found["passes"] == found["settings"]["epochs"]
    assert len(trained) == 2 * len(rivals.candidates(name)) + 1
    assert {call["epsilon"] for call in trained} == {1.0}
    assert any(call["learning_rate"] > 0.5 for call in trained)

    trained.clear()
    again = Journal(tmp_path / "log.jsonl", "suite")  # another process goes on
    assert rivals.free(name, 1.0, 3, again, searched=[0, 1]) == found
    rivals.free(name, 1.0, 4, again, searched=[0, 1])
    assert len(trained) == 1


def test_charged_tuning_keeps_the_best_of_trials_at_a_smaller_budget(trained, tmp_path):
    log = Journal(None, "suite")
    numbers, rates = [], []
    for seed in range(8):
        trained.clear()
        found = rivals.charged("icu", 1.0, seed, log)
        numbers.append(found["trials"])
        assert len(trained) == found["trials"]
        assert len({call["epsilon"] for call in trained}) == 1
        assert trained[0]["epsilon"] == found["epsilon of a trial"] < 1 / 1.3
        assert len({call["seed"] for call in trained}) == len(trained)
        tried = [call["learning_rate"] for call in trained if call["learning_rate"] < 0.5]
        best = min(tried, key=lambda rate: abs(math.log(rate / 0.1)))
        assert found["settings"]["learning_rate"] == best
        assert found["passes"] == sum(call["epochs"] for call in trained)
        rates += tried
    assert len(set(numbers)) > 2
    assert 5 < np.mean(numbers) < 15
    assert len(set(rates)) > 4


def test_no_trial_at_all_leaves_the_start(trained, monkeypatch):
    monkeypatch.setattr(Trials, "draw", lambda self, generator: 0)
    found = rivals.charged("icu", 1.0, 0, Journal(None, "suite"))
    assert (found["score"], found["passes"], found["trials"]) == (50.0, 0, 0)
    assert trained == []


def test_untuned_is_the_example_of_opacus(trained):
    found = rivals.untuned("icu", 1.0, 0, Journal(None, "suite"))
    [call] = trained
    assert call["epsilon"] == 1.0
    assert {name: call[name] for name in rivals.TUTORIAL} == rivals.TUTORIAL
    assert found["settings"] == rivals.TUTORIAL


def test_a_share_of_the_records_is_a_batch(trained):
    settings = {"learning_rate": 0.1, "max_grad_norm": 1.0, "sample_rate": 0.05, "epochs": 3}
    rivals.run("icu", settings, 1.0, 0, Journal(None, "suite"))
    assert trained[0]["batch_size"] == 10
    assert rivals.schedule(settings, 200) == (20, 3)
    assert rivals.schedule({**settings, "sample_rate": 1.0}, 200) == (1, 3)


def test_a_run_is_dp_sgd(monkeypatch):
    """The real one, on a small task."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    start = nn.Linear(2, 2)
    small = tasks.Task(start, data, data, data, nn.CrossEntropyLoss(), name="icu", metric="accuracy")
    monkeypatch.setattr(rivals, "task_of", lambda name, seed: small)
    settings = {"learning_rate": 0.3, "max_grad_norm": 1.0, "sample_rate": 0.1, "epochs": 5}
    found = rivals.run("icu", settings, 10.0, 0, Journal(None, "suite"))
    assert found["score"] > 90
    other = rivals.run("icu", settings, 10.0, 0, Journal(None, "suite"), trial=1)
    assert other["metric"] == "accuracy"


def test_every_grid_is_of_a_task_and_lists_what_dp_sgd_needs():
    assert set(rivals.GRIDS) == {"sine", "mnist", "mnist_far", "icu", "sms_head", "sms_lora", "cifar10_head"}
    for name in rivals.GRIDS:
        assert callable(getattr(tasks, name))
        assert len(rivals.candidates(name)) >= 4
        for settings in rivals.candidates(name):
            assert set(settings) == {"learning_rate", "max_grad_norm", "sample_rate", "epochs"}


def test_the_table_and_the_command_line(trained, tmp_path, monkeypatch, capsys):
    arguments = ["rivals", "icu", "--log", str(tmp_path / "log.jsonl"), "--epsilon", "1", "--seeds", "2"]
    monkeypatch.setattr("sys.argv", arguments)
    rivals.main()
    printed = capsys.readouterr().out
    assert re.search(r"\| icu  \| free    \| 1 \| 90\.0 ± 0\.0 \| 10     \| 0       \|", printed)
    assert all(f"| {rival} " in printed for rival in rivals.RIVALS)
    assert Path(tmp_path / "log.jsonl").read_text().count("\n") > 22


# --- which law of trials is kindest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("mean", [5.0, 10.0])
def test_the_mean_of_the_best_is_that_of_its_law(shape, mean):
    """Written out over the number of trials, and the best of each number as the largest of independent draws."""
    trials, merits, start = Trials(mean, shape), [3.0, -1.0, 2.5, 7.0], -4.0
    law = probabilities(trials)
    expected = law[0] * start
    for k in range(1, len(law)):
        reached = (np.arange(5) / 4) ** k
        expected += law[k] * (np.diff(reached) @ np.sort(merits))
    assert expected_best(trials, merits, start) == pytest.approx(expected, rel=1e-9)
    assert expected_best(Trials(2 * mean, shape), merits, start) != pytest.approx(expected, rel=1e-3)  # the control


def test_the_laws_are_compared_in_a_table(trained, tmp_path, capsys):
    compare_laws(["icu", "--log", str(tmp_path / "log.jsonl"), "--epsilons", "1", "--seeds", "1"])
    printed = capsys.readouterr().out
    assert all(f"| icu  | {law} " in printed for law in LAWS)
    assert {call["epsilon"] for call in trained} == {
        rivals.charged_epsilon(1.0, 1e-5, ((1, 20), (20, 10)), trials) for trials in LAWS.values()
    }
