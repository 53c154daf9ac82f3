"""The source paper's six figures, each drawn twice: with the paper's calibration and sampler, and with ours.

| | ``"paper_not_private"`` | ``"ours"`` |
|---|---|---|
| bounds | largest Jacobian and residual of the private data, times 1.1 | quantiles of projected norms on public data |
| calibration | c = ε/(2ΔU) with the full-space bounds [eq:sens_MS, eq:sens_CE] | ``range``: c = ε/W, in the subspace |
| sampler | Gibbs | exact |
| guarantee of one candidate | none: the bounds are read off the private data | ε-DP, add/remove |

Both use the paper's k, R and ridge λ and the same subspaces, with one pass for each: every ε and radius is drawn from its
sums. A point of a curve is the mean over many simulated candidates.

**Privacy:** this is an experiment, not a release. All candidates of a curve come from the same statistics and together
are private to no useful degree, with either calibration; DP-SGD is tuned on private records without charge. Run it on data
on which that is allowed.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from opacus_expm import _check
from opacus_expm.accountant import NoGuarantee
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.experiments import tasks
from opacus_expm.experiments.compare import compare, task_digest
from opacus_expm.experiments.downloads import AnyPath
from opacus_expm.experiments.journal import Journal, read_result, write_result
from opacus_expm.experiments.methods import Grid
from opacus_expm.experiments.tasks import Task
from opacus_expm.sampling import Exact, Gibbs, Sampler
from opacus_expm.statistics import Statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EPSILONS = (0.1, 1.0, 2.0, 5.0, 10.0, 50.0)
RADII = (0.01, 0.1, 0.15, 0.5)
RADIUS = 0.1  # of the figures with varied k
MODERATE = (0.1, 0.15)
METHODS = {
    "paper_not_private": "the paper's calibration, Gibbs sampler",
    "ours": "ours: range calibration, exact sampler",
}
FIGURES = ("radius", "dimension")

_PUBLIC_RECORDS = 5000  # at the most, for our bounds
_BATCH = 500
_FILE = "simulations.jsonl"


@dataclass(frozen=True)
class Setting:
    """What the paper fixes for a task, and what it says of its figures.

    Attributes:
        proj_dim: k of the figure with varied R.
        dims: k of the figure with varied k.
        regularization: the paper's λ.
        learning_rate: of the paper's training; DP-SGD is also run at it, since the paper gives no other.
        crossing: the ε from which ExpM-Quad is said to beat the pretrained model.
        flat_from: the ε from which DP-SGD is said to be flat.
        enough: a k beyond which little is said to be gained, if any.
    """

    proj_dim: int
    dims: tuple[int, ...]
    regularization: float
    learning_rate: float
    crossing: float
    flat_from: float
    enough: int | None = None


@dataclass(frozen=True)
class Effort:
    """How much is computed; what it says goes into the result.

    Attributes:
        draws: candidates for each point of a curve.
        gibbs: the paper's sampler.
        seeds: runs of the reference methods.
        non_private: grid of non-private fine-tuning.
        dp_sgd: grid of DP-SGD.
    """

    draws: int
    gibbs: Gibbs
    seeds: int
    non_private: Grid
    dp_sgd: Grid


def _grids(*, rates: Sequence[float], epochs: int, non_private: tuple[float, int, int]) -> tuple[Grid, Grid]:
    """One setting for non-private training, several rates for DP-SGD."""
    names = ("learning_rate", "batch_size", "epochs")
    return (
        {name: (value,) for name, value in zip(names, non_private, strict=True)},
        {"learning_rate": rates, "max_grad_norm": (1.0,), "sample_rate": (0.05,), "epochs": (epochs,)},
    )


@dataclass(frozen=True)
class Curve:
    """Mean and standard deviation of the metric over simulated candidates, against ε.

    Attributes:
        method: a key of ``METHODS``.
        loss: ``"mse"`` or ``"cross_entropy"``.
        proj_dim: k.
        radius: R.
        epsilons: ascending.
        means: one for each ε.
        stds: one for each ε.
        stated: the ε that a ledger states after one release like these candidates; None where it refuses to.
    """

    method: str
    loss: str
    proj_dim: int
    radius: float
    epsilons: tuple[float, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]
    stated: tuple[float | None, ...]


@dataclass(frozen=True)
class Reference:
    """A method to compare with: one value, or one for each ε.

    Attributes:
        method: ``"zero-shot"``, ``"non-private"``, ``"dp-sgd"`` (tuned) or ``"dp-sgd-paper-rate"``.
        loss: as in ``Curve``.
        epsilons: empty for methods without a budget.
        means: of the metric over seeds.
        stds: likewise.
    """

    method: str
    loss: str
    epsilons: tuple[float, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]


@dataclass(frozen=True)
class Finding:
    """Whether a claim of the paper was found again: ``"yes"``, ``"no"``, or ``"better"`` where it is surpassed."""

    verdict: str
    found: str


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and what came of it by method.

    Attributes:
        title: the statement in short, the same for every task.
        statement: with the task's numbers, and how it is judged.
        findings: by method.
    """

    title: str
    statement: str
    findings: Mapping[str, Finding]


@dataclass(frozen=True)
class Cost:
    """What the curves took.

    Attributes:
        passes: over the private data, one for each subspace, method and loss.
        pass_seconds: mean time of one, its bounds included.
        candidates: models drawn from them.
        draw_seconds: mean time to draw and build one.
        score_seconds: mean time to score one.
    """

    passes: int
    pass_seconds: float
    candidates: int
    draw_seconds: float
    score_seconds: float


@dataclass(frozen=True, repr=False)
class Reproduction:
    """What ``reproduce`` found.

    Attributes:
        task: name.
        metric: ``"accuracy"`` (in percent) or ``"loss"``.
        loss: that of the figures; a second one is there for a claim.
        parameters: p.
        records: private records.
        test_records: on which everything is scored.
        draws: candidates for each point.
        seed: of data, subspaces and noise.
        delta: of DP-SGD.
        setting: what the paper fixes.
        curves: of both figures, and those of a second loss.
        references: the lines beside them.
        cost: of the curves.
        quick: whether the run was made small.
    """

    task: str
    metric: str
    loss: str
    parameters: int
    records: int
    test_records: int
    draws: int
    seed: int
    delta: float
    setting: Setting
    curves: tuple[Curve, ...]
    references: tuple[Reference, ...]
    cost: Cost
    quick: bool = False

    def __repr__(self) -> str:
        return f"Reproduction({self.task!r}, curves={len(self.curves)}, draws={self.draws})"

    def figure(self, kind: str, method: str) -> tuple[Curve, ...]:
        """The curves of one panel: ``"radius"`` has k fixed and R varied, ``"dimension"`` R fixed and k varied."""
        own = [c for c in self.curves if (c.method, c.loss) == (method, self.loss)]
        if _check.one_of("kind", kind, FIGURES) == "radius":
            return tuple(sorted((c for c in own if c.proj_dim == self.setting.proj_dim), key=lambda c: c.radius))
        return tuple(sorted((c for c in own if c.radius == RADIUS), key=lambda c: c.proj_dim))

    def reference(self, method: str, loss: str | None = None) -> Reference:
        """A line.

        Raises:
            KeyError: there is none.
        """
        for line in self.references:
            if (line.method, line.loss) == (method, loss or self.loss):
                return line
        raise KeyError(f"no line for {method!r} with the loss {loss or self.loss!r}")

    def claims(self) -> tuple[Claim, ...]:
        """The paper's statements about its figures, judged by these curves; how is in each statement."""
        return _claims(self)

    def table(self) -> str:
        """The claims in Markdown, and the conditions they hold under."""
        head = [
            "the paper says",
            *(f"{label}{'' if m == 'ours' else ' (not private)'}" for m, label in METHODS.items()),
        ]
        lines = [f"| {' | '.join(head)} |", "|---|---|---|"]
        for claim in self.claims():
            cells = [f"**{claim.findings[m].verdict}**: {claim.findings[m].found}" for m in METHODS]
            lines.append(f"| {' | '.join([claim.statement, *cells])} |")
        return "\n".join([*lines, "", *self._conditions()])

    def _conditions(self) -> list[str]:
        """What the numbers mean."""
        stated = sorted({e for c in self.curves if c.method == "ours" for e in c.stated if e is not None})
        return [
            f"{self.task}{' (quick run)' if self.quick else ''}: {self.records} private records, p = {self.parameters}; "
            f"means over {self.draws} simulated candidates, on {self.test_records} test records; seed {self.seed}.",
            "A SIMULATION: the candidates of a curve come from the same statistics and are not private together.",
            "The paper's bounds are read off the private data: NOT differentially private at any ε; the ledger refuses to "
            "state one.",
            "Ours has the same k, R and λ, and takes its bounds from the public data; for one candidate the ledger states "
            + "ε = "
            + ", ".join(f"{e:g}" for e in stated)
            + f", as asked. DP-SGD has δ = {self.delta:g}.",
        ]

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write everything, the claims included."""
        write_result(path, {**dataclasses.asdict(self), "claims": [dataclasses.asdict(c) for c in self.claims()]})

    @classmethod
    def from_json(cls, path: str | PathLike[str]) -> Reproduction:
        """Read what ``to_json`` wrote; the claims are judged again.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            content = read_result(path)
            del content["claims"]
            content["setting"] = Setting(**_tuples(content["setting"]))
            content["cost"] = Cost(**content["cost"])
            content["curves"] = tuple(Curve(**_tuples(c)) for c in content["curves"])
            content["references"] = tuple(Reference(**_tuples(r)) for r in content["references"])
            return cls(**content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"path {str(path)!r} holds no reproduction written by to_json: {error}") from error

    def plot(self, directory: str | PathLike[str]) -> tuple[Path, Path]:
        """Draw both figures, two panels each on the same axes, as ``TASK-radius.png`` and ``TASK-dimension.png``.

        Raises:
            ImportError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import LogLocator, NullLocator
        except ImportError as error:
            raise ImportError('plot() needs matplotlib: pip install "opacus-expm[plots]"') from error
        Path(directory).mkdir(parents=True, exist_ok=True)
        paths = []
        for kind in FIGURES:
            figure = Figure(figsize=(9.0, 4.3), layout="constrained")
            panels = figure.subplots(1, 2, sharex=True, sharey=True)
            for axes, method in zip(panels, METHODS, strict=True):
                _draw(self, kind, method, axes)
            if self.metric == "accuracy":
                panels[0].set_ylabel("test accuracy (%)")
            else:  # noise in a large ball multiplies a loss, and would hide everything else
                panels[0].set_yscale("log")
                panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
                panels[0].yaxis.set_minor_locator(NullLocator())
                panels[0].yaxis.set_major_formatter("{x:g}")
                panels[0].set_ylabel("test loss (logarithmic)")
            fixed = f"k = {self.setting.proj_dim}, varied R" if kind == "radius" else f"R = {RADIUS:g}, varied k"
            figure.suptitle(f"{self.task}: {fixed}; mean ± std of {self.draws} simulated candidates", fontsize="medium")
            figure.legend(
                *panels[0].get_legend_handles_labels(),
                loc="outside lower center",
                ncols=5,
                fontsize="small",
                frameon=False,
                handlelength=3.4,
                columnspacing=1.4,
            )
            paths.append(Path(directory) / f"{self.task}-{kind}.png")
            figure.savefig(paths[-1], dpi=110)
        return paths[0], paths[1]


_EXPERIMENTS: Mapping[str, tuple[Setting, Effort]] = {
    # The paper's clinical model has k in {20, 40, 200}; that of the open data has 22 parameters. No λ is given for it.
    "sine": (
        Setting(20, (5, 10, 20, 40), 0.0, 1e-2, crossing=1.0, flat_from=0.1, enough=20),
        Effort(500, Gibbs(), 3, *_grids(rates=(0.003, 0.01, 0.03, 0.1), epochs=10, non_private=(1e-2, 256, 60))),
    ),
    "mnist": (
        Setting(400, (50, 100, 200, 400), 1.0, 1e-3, crossing=1.0, flat_from=1.0),
        Effort(500, Gibbs(), 1, *_grids(rates=(0.01, 0.1, 0.3), epochs=5, non_private=(2e-3, 256, 10))),
    ),
    "icu": (
        Setting(20, (5, 10, 20, 22), 0.0, 5e-2, crossing=5.0, flat_from=0.1, enough=20),
        Effort(500, Gibbs(), 3, *_grids(rates=(0.01, 0.03, 0.1, 0.3), epochs=10, non_private=(1e-2, 256, 30))),
    ),
}
TASKS = tuple(_EXPERIMENTS)


def reproduce_task(
    name: str,
    *,
    draws: int | None = None,
    test_records: int | None = None,
    seed: int = 0,
    quick: bool = False,
    data_dir: AnyPath | None = None,
    out: str | PathLike[str] | None = None,
    progress: bool | None = None,
) -> Reproduction:
    """The paper's two figures of one of its experiments; see ``reproduce``.

    Args:
        name: ``"sine"``, ``"mnist"`` or ``"icu"`` (with open data in place of the credentialed; see ``tasks.icu``). All are
            trained with mean squared error, as in the paper; ``"mnist"`` has a curve with cross-entropy beside.
        draws: candidates for each point; 500 by default, 20 in a quick run.
        test_records: the first so many records of the test data score everything; by default 500 of MNIST, of which there
            are 10,000, and all of the others.
        seed: of data, pretraining, subspaces and noise.
        quick: few draws, records and sweeps, and a smaller subspace for MNIST: about a minute.
        data_dir: where the data is.
        out: directory for finished points.
        progress: show a bar.
    """
    _check.one_of("name", name, TASKS)
    _check.seed("seed", seed)  # before anything is trained with it
    for label, value in (("draws", draws), ("test_records", test_records)):
        if value is not None:
            _check.positive_int(label, value)
    setting, effort = _EXPERIMENTS[name]
    if quick:
        one = {key: (values[len(values) // 2],) for key, values in effort.dp_sgd.items()}
        effort = Effort(20, Gibbs(burn_in=20), 1, {**effort.non_private, "epochs": (5,)}, {**one, "epochs": (2,)})
        if name == "mnist":
            setting = dataclasses.replace(setting, proj_dim=40, dims=(5, 10, 20, 40))
    losses: dict[str, Task]
    if name == "sine":
        losses = {"mse": tasks.sine(seed)}
    elif name == "icu":
        losses = {"mse": tasks.icu(seed, data_dir=data_dir, loss="mse")}
    else:
        records = 2000 if quick else 20_000
        losses = {
            loss: tasks.mnist(seed, data_dir=data_dir, records=records, loss=loss) for loss in ("mse", "cross_entropy")
        }
        test_records = test_records or (200 if quick else 500)
    return reproduce(
        {loss: _with_test_records(task, test_records) for loss, task in losses.items()},
        setting,
        dataclasses.replace(effort, draws=draws or effort.draws),
        seed=seed,
        quick=quick,
        out=out,
        progress=progress,
    )


def _with_test_records(task: Task, count: int | None) -> Task:
    """The task with the first of its test records only."""
    return dataclasses.replace(task, test=TensorDataset(*(t[:count] for t in task.test.tensors)))


def reproduce(
    losses: Mapping[str, Task],
    setting: Setting,
    effort: Effort,
    *,
    delta: float = 1e-5,
    seed: int = 0,
    quick: bool = False,
    out: str | PathLike[str] | None = None,
    progress: bool | None = None,
) -> Reproduction:
    """The paper's two figures of a task, with both methods.

    Args:
        losses: the task, by loss; the first is that of the figures. With a second one, the curves at the figures' fixed k
            and R are drawn for it too.
        setting: what the paper fixes.
        effort: how much is computed.
        delta: δ of DP-SGD.
        seed: of subspaces and noise.
        quick: what the result says of itself.
        out: directory for finished points; a run that was interrupted goes on from there.
        progress: show a bar; None shows it on a terminal.

    Raises:
        TypeError, ValueError: bad input, before anything runs.

    **Privacy:** none, and a warning says so; see the top of the module.
    """
    if not losses or not all(isinstance(task, Task) for task in losses.values()):
        raise TypeError(f"losses must map the name of a loss to its Task, got {losses!r}")
    _check.positive_int("draws", effort.draws)
    _check.seed("seed", seed)
    main = next(iter(losses))
    task = losses[main]
    parameters = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    if max(*setting.dims, setting.proj_dim) > parameters:
        raise ValueError(f"setting has dimensions above the model's {parameters} parameters: {setting.dims}")
    warnings.warn(
        "reproduce() simulates, and reads the paper's bounds off the private data: nothing here is differentially private",
        UserWarning,
        stacklevel=2,
    )
    points = _points(tuple(losses), setting)
    with tqdm(total=len(points), desc=task.name, disable=None if progress is None else not progress) as bar:
        simulations = {
            name: _Simulations(own, name, setting, effort, seed, None if out is None else Path(out) / _FILE)
            for name, own in losses.items()
        }
        curves, outcomes = [], []
        for loss, method, dim, radius in points:
            found = [simulations[loss].point(method, dim, radius, epsilon) for epsilon in EPSILONS]
            outcomes += found
            means, stds = (tuple(math.nan if f[n] is None else f[n] for f in found) for n in ("mean", "std"))
            curves.append(Curve(method, loss, dim, radius, EPSILONS, means, stds, tuple(f["stated"] for f in found)))
            bar.update()
    passed = [seconds for s in simulations.values() for seconds in s.pass_seconds()]
    return Reproduction(
        task=task.name,
        metric=task.metric,
        loss=main,
        parameters=parameters,
        records=len(task.private),
        test_records=len(task.test),
        draws=effort.draws,
        seed=seed,
        delta=delta,
        setting=setting,
        curves=tuple(curves),
        references=tuple(
            line
            for name, own in losses.items()
            for line in _references(own, name, setting, effort, delta, out, progress, complete=name == main)
        ),
        cost=Cost(
            passes=len(passed),
            pass_seconds=float(np.mean(passed)),
            candidates=effort.draws * len(outcomes),
            draw_seconds=float(np.mean([o["draw_seconds"] for o in outcomes])),
            score_seconds=float(np.mean([o["score_seconds"] for o in outcomes])),
        ),
        quick=quick,
    )


def _points(losses: Sequence[str], setting: Setting) -> list[tuple[str, str, int, float]]:
    """(loss, method, k, R) of every curve; those of one subspace are neighbours."""
    pairs = {(setting.proj_dim, r) for r in RADII} | {(k, RADIUS) for k in setting.dims}
    found = [(losses[0], method, *pair) for method in METHODS for pair in sorted(pairs)]
    return found + [(loss, method, setting.proj_dim, RADIUS) for loss in losses[1:] for method in METHODS]


class _Simulations:
    """Points of the curves of one task, from the statistics of the last pass."""

    def __init__(self, task: Task, loss: str, setting: Setting, effort: Effort, seed: int, path: Path | None):
        self._task, self._setting, self._effort, self._seed = task, setting, effort, seed
        self._engine = ExpMQuadEngine(distributed=False)  # simulates only; its ledger stays empty
        self._pass: tuple[str, int, Statistics] | None = None
        self._passes: dict[tuple[str, int], float] = {}
        facts = [loss, setting.regularization, seed, effort.draws, repr(effort.gibbs)]
        self._journal = Journal(path, task_digest(task, *facts))

    def pass_seconds(self) -> list[float]:
        """How long each pass took, also those of an earlier run."""
        return list(self._passes.values())

    def point(self, method: str, dim: int, radius: float, epsilon: float) -> dict[str, Any]:
        """Mean, deviation and cost of many candidates, and what the ledger states for one."""
        cell = {"method": method, "proj_dim": dim, "radius": radius, "epsilon": epsilon}
        found = self._journal.get(cell)
        if found is None:
            self._gather(method, dim)
            found = self._journal.put(cell, self._simulate(cell) | {"pass_seconds": self._passes[method, dim]})
        self._passes.setdefault((method, dim), found["pass_seconds"])
        return found

    def _gather(self, method: str, dim: int) -> None:
        """One pass for a subspace; both methods have the same one."""
        if self._pass is not None and self._pass[:2] == (method, dim):
            return
        self._pass = None  # before the next statistics are there
        x, y = self._task.public.tensors
        some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:_PUBLIC_RECORDS]
        source: dict[str, Any] = {"bounds": "paper"}
        if method == "ours":
            source = {"public_loader": DataLoader(TensorDataset(x[some], y[some]), batch_size=_BATCH)}
        start = time.perf_counter()
        with _said_already():
            statistics = self._engine.gather(
                self._task.model,
                DataLoader(self._task.private, batch_size=_BATCH),
                dim,
                criterion=self._task.criterion,
                projection_seed=self._seed,
                progress=False,
                **source,
            )
        self._passes[method, dim] = time.perf_counter() - start
        self._pass = (method, dim, statistics)

    def _simulate(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """Draw, build and score candidates."""
        assert self._pass is not None
        scoring = 0.0

        def evaluate(module: nn.Module) -> float:
            nonlocal scoring
            start = time.perf_counter()
            value = self._task.score(module)
            scoring += time.perf_counter() - start
            return value

        draws, statistics = self._effort.draws, self._pass[2]
        options = drawing(cell["method"], self._setting.regularization)
        sampler: Sampler = self._effort.gibbs if cell["method"] == "paper_not_private" else Exact()
        noise = np.random.default_rng([self._seed, zlib.crc32(repr(sorted(cell.items())).encode())])
        start = time.perf_counter()
        with _said_already():
            values = self._engine.simulate(
                statistics,
                cell["epsilon"],
                cell["radius"],
                evaluate,
                draws=draws,
                sampler=sampler,
                noise_generator=noise,
                **options,
            )
        seconds = time.perf_counter() - start
        return {
            "mean": float(values.mean()),
            "std": float(values.std(ddof=1)) if draws > 1 else 0.0,
            "stated": stated_epsilon(statistics, cell["epsilon"], cell["radius"], options),
            "draw_seconds": (seconds - scoring) / draws,
            "score_seconds": scoring / draws,
        }


def summary(found: Sequence[Reproduction]) -> str:
    """The verdicts of several tasks in one Markdown table: the paper's calibration first, then ours."""
    rows: dict[str, dict[str, str]] = {}
    for one in found:
        for claim in one.claims():
            verdicts = " / ".join(claim.findings[m].verdict for m in METHODS)
            rows.setdefault(claim.title, {})[one.task] = verdicts
    names = [one.task for one in found]
    lines = [f"| the paper says | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    lines += [f"| {title} | {' | '.join(cells.get(n, '–') for n in names)} |" for title, cells in rows.items()]
    return "\n".join(lines)


def drawing(method: str, regularization: float) -> dict[str, Any]:
    """How a method calibrates: arguments of ``ExpMQuadEngine.release`` and ``simulate``.

    Args:
        method: a key of ``METHODS``.
        regularization: the paper's λ, for both.
    """
    ours = _check.one_of("method", method, tuple(METHODS)) == "ours"
    return {"calibration": "range" if ours else "paper", "regularization": regularization}


def stated_epsilon(statistics: Statistics, epsilon: float, radius: float, options: Mapping[str, Any]) -> float | None:
    """The pure ε in a new ledger after one exact release at ε; None where it refuses to state any."""
    engine = ExpMQuadEngine(distributed=False)
    engine.release(statistics, epsilon, radius, **options)
    try:
        return engine.get_epsilon(0.0)
    except NoGuarantee:
        return None


@contextmanager
def _said_already() -> Iterator[None]:
    """Without the warnings that ``reproduce`` gave once for all."""
    with warnings.catch_warnings():
        for message in (r"simulate\(\) draws models", "bounds='paper' reads", "sampler='gibbs' is only"):
            warnings.filterwarnings("ignore", message=message)
        yield


def _references(
    task: Task,
    loss: str,
    setting: Setting,
    effort: Effort,
    delta: float,
    out: str | PathLike[str] | None,
    progress: bool | None,
    *,
    complete: bool,
) -> list[Reference]:
    """Zero-shot, non-private and, for the loss of the figures, DP-SGD: tuned, and at the paper's learning rate."""
    untuned: Grid = {**effort.dp_sgd, "learning_rate": (setting.learning_rate,), "momentum": (0.0,)}
    runs: list[tuple[str, tuple[str, ...], Grid]] = [("dp-sgd", ("zero-shot", "non-private"), effort.dp_sgd)]
    if complete:
        runs = [
            ("dp-sgd", ("zero-shot", "non-private", "dp-sgd"), effort.dp_sgd),
            ("dp-sgd-paper-rate", ("dp-sgd",), untuned),
        ]
    found = []
    for name, methods, grid in runs:
        compared = compare(
            task,
            EPSILONS,
            delta=delta,
            seeds=effort.seeds,
            methods=methods,
            trials=1,
            grids={m: g for m, g in (("non-private", effort.non_private), ("dp-sgd", grid)) if m in methods},
            out=out,
            progress=progress,
        )
        for method in methods:
            rows = [row for row in compared.rows if row.method == method]
            budgets = tuple(row.epsilon for row in rows if row.epsilon is not None)
            values = tuple(row.mean for row in rows), tuple(row.std for row in rows)
            found.append(Reference(name if method == "dp-sgd" else method, loss, budgets, *values))
    return found


# --- what the paper says ---------------------------------------------------------------------------------------------

_LARGE = 5.0  # the ε from which the paper compares dimensions
_CLOSED = 0.8  # share of the way from zero-shot to non-private that "approaches" asks for
_COMPETITIVE = 0.5  # and "competitive"
_FLAT = 0.1  # and what is no more than flat
_SLACK = 0.01  # of that way: what is no decrease, and no gain
_NEAR = 3.0  # factor within which an ε is near another


def _claims(found: Reproduction) -> tuple[Claim, ...]:
    """All claims that apply to the task."""
    setting = found.setting
    judged: list[tuple[str, str, Callable[[Reproduction, str], Finding]]] = [
        ("a moderate R is best", "a moderate R (0.1, 0.15) is best, on average over ε ≥ 1", _moderate_is_best),
        (
            "larger k is better",
            f"larger k is better (each of the larger half above each of the smaller, ε ≥ {_LARGE:g})",
            _larger_is_better,
        ),
        ("the mean improves with ε", "the mean improves with ε in every curve", _monotone),
        (
            "it beats zero-shot from about the ε said",
            f"with a moderate R it beats zero-shot from ε near {setting.crossing:g} on (factor {_NEAR:g})",
            _crossing,
        ),
        (
            "it approaches non-private training",
            f"with a moderate R it approaches non-private training at ε = {EPSILONS[-1]:g} ({_CLOSED:.0%} of the gap)",
            _approaches,
        ),
        (
            "DP-SGD is flat (at the paper's rate / tuned)",
            f"DP-SGD is flat from ε = {setting.flat_from:g} on (changes below {_FLAT:.0%} of the gap)",
            _flat,
        ),
        ("it overtakes tuned DP-SGD", "with a moderate R it overtakes DP-SGD (tuned) at the largest ε", _overtakes),
        ("many candidates from one pass", f"{found.draws} candidates come from one pass", _one_pass),
    ]
    if setting.enough is not None:
        text = f"beyond k = {setting.enough} little is gained (below {_FLAT:.0%} of the gap)"
        judged.insert(2, ("a small k is enough", text, _enough_is_enough))
    if any(c.loss != found.loss for c in found.curves):
        text = f"cross-entropy is not competitive (below {_COMPETITIVE:.0%} of its gap at ε ≤ 10)"
        judged.insert(-1, ("cross-entropy is not competitive", text, _cross_entropy))
    return tuple(Claim(title, text, {m: judge(found, m) for m in METHODS}) for title, text, judge in judged)


def _merit(found: Reproduction, value: float) -> float:
    """Larger is better."""
    return value if found.metric == "accuracy" else -value


def _number(found: Reproduction, value: float) -> str:
    """A value of the metric for people."""
    return f"{value:.1f} %" if found.metric == "accuracy" else f"{value:.4f}"


def _gap(found: Reproduction, loss: str | None = None) -> float:
    """The way from zero-shot to non-private."""
    ends = (found.reference(m, loss).means[0] for m in ("non-private", "zero-shot"))
    best, start = (_merit(found, value) for value in ends)
    return best - start


def _share(found: Reproduction, value: float, loss: str | None = None) -> float:
    """The part of that way that a value has gone; NaN where there is no way to go."""
    gap = _gap(found, loss)
    gone = _merit(found, value) - _merit(found, found.reference("zero-shot", loss).means[0])
    return gone / gap if gap > 0 else math.nan


def _average(curve: Curve, least: float) -> float:
    """The mean of a curve's means from an ε on."""
    return float(np.mean([m for e, m in zip(curve.epsilons, curve.means, strict=True) if e >= least]))


def _at(line: Curve | Reference, epsilon: float) -> float:
    """The mean at an ε."""
    return line.means[line.epsilons.index(epsilon)]


def _verdict(held: bool) -> str:
    return "yes" if held else "no"


def _best_radius(found: Reproduction, method: str, radii: Sequence[float] = RADII) -> Curve:
    """The curve of the first figure that is best on average over ε ≥ 1."""
    curves = [c for c in found.figure("radius", method) if c.radius in radii]
    return max(curves, key=lambda c: _merit(found, _average(c, 1.0)))


def _moderate_is_best(found: Reproduction, method: str) -> Finding:
    curves = found.figure("radius", method)
    best = _best_radius(found, method)
    last = max(curves, key=lambda c: _merit(found, c.means[-1]))
    averages = ", ".join(f"{c.radius:g}: {_number(found, _average(c, 1.0))}" for c in curves)
    return Finding(
        _verdict(best.radius in MODERATE),
        f"R = {best.radius:g} is ({averages}); at ε = {last.epsilons[-1]:g} it is R = {last.radius:g}",
    )


def _larger_is_better(found: Reproduction, method: str) -> Finding:
    averages = {c.proj_dim: _average(c, _LARGE) for c in found.figure("dimension", method)}
    merits = [_merit(found, value) for value in averages.values()]
    half = len(merits) // 2
    text = ", ".join(f"k = {k}: {_number(found, value)}" for k, value in averages.items())
    return Finding(_verdict(min(merits[half:]) > max(merits[:half])), text)


def _enough_is_enough(found: Reproduction, method: str) -> Finding:
    curves = {c.proj_dim: c for c in found.figure("dimension", method)}
    enough, most = found.setting.enough, max(curves)
    assert enough is not None
    more, less = (_share(found, _average(curves[k], _LARGE)) for k in (most, enough))
    return Finding(_verdict(more - less < _FLAT), f"k = {most} gains {more - less:+.0%} of the gap over k = {enough}")


def _monotone(found: Reproduction, method: str) -> Finding:
    curves = {(c.proj_dim, c.radius): c for kind in FIGURES for c in found.figure(kind, method)}
    falls = []
    for curve in curves.values():
        for i in range(len(curve.means) - 1):
            error = 2 * math.hypot(curve.stds[i], curve.stds[i + 1]) / math.sqrt(found.draws)
            fall = _merit(found, curve.means[i]) - _merit(found, curve.means[i + 1])
            if not fall <= max(error, _SLACK * abs(_gap(found))):
                steps = f"ε {curve.epsilons[i]:g} → {curve.epsilons[i + 1]:g}"
                falls.append(f"k = {curve.proj_dim}, R = {curve.radius:g} ({steps})")
                break
    text = f"{len(curves) - len(falls)} of {len(curves)} curves" + (f"; not {', '.join(falls)}" if falls else "")
    return Finding(_verdict(not falls), text)


def _crossing(found: Reproduction, method: str) -> Finding:
    curve = _best_radius(found, method, MODERATE)
    above = [e for e, m in zip(curve.epsilons, curve.means, strict=True) if _share(found, m) > _SLACK]
    if not above:
        return Finding("no", f"nowhere (R = {curve.radius:g})")
    first, claimed = above[0], found.setting.crossing
    missed = [e for e in curve.epsilons if e > first and e not in above]
    text = f"from ε = {first:g} (R = {curve.radius:g})" + (
        f", but not at {', '.join(map('{:g}'.format, missed))}" if missed else ""
    )
    if missed or first > _NEAR * claimed:
        return Finding("no", text)
    return Finding("better" if first < claimed / _NEAR else "yes", text)


def _approaches(found: Reproduction, method: str) -> Finding:
    curve, best = _best_radius(found, method, MODERATE), _best_radius(found, method)
    share = _share(found, curve.means[-1])
    ends = " and ".join(_number(found, found.reference(m).means[0]) for m in ("zero-shot", "non-private"))
    text = f"{share:.0%} of the gap: {_number(found, curve.means[-1])} (R = {curve.radius:g}), between {ends}"
    if best is not curve:
        text += f"; {_share(found, best.means[-1]):.0%} at R = {best.radius:g}"
    return Finding(_verdict(share >= _CLOSED), text)


def _flat(found: Reproduction, method: str) -> Finding:
    name, label = ("dp-sgd", "tuned") if method == "ours" else ("dp-sgd-paper-rate", "at the paper's learning rate")
    line = found.reference(name)
    shares = [_share(found, m) for e, m in zip(line.epsilons, line.means, strict=True) if e >= found.setting.flat_from]
    text = f"DP-SGD {label}: {shares[0]:.0%} of the gap at ε = {found.setting.flat_from:g}, {shares[-1]:.0%} at the end"
    return Finding(_verdict(max(shares) - min(shares) < _FLAT), text)


def _overtakes(found: Reproduction, method: str) -> Finding:
    curve, best, line = _best_radius(found, method, MODERATE), _best_radius(found, method), found.reference("dp-sgd")

    def ahead(own: Curve) -> list[float]:
        pairs = zip(own.epsilons, own.means, strict=True)
        return [e for e, m in pairs if _merit(found, m) > _merit(found, _at(line, e))]

    def listed(own: Curve) -> str:
        return f"ahead at {'ε = ' + ', '.join(f'{e:g}' for e in ahead(own)) if ahead(own) else 'no ε'} (R = {own.radius:g})"

    text = f"{_number(found, curve.means[-1])} against {_number(found, line.means[-1])}; {listed(curve)}"
    if best is not curve:
        text += f", {listed(best)}"
    return Finding(_verdict(curve.epsilons[-1] in ahead(curve)), text)


def _cross_entropy(found: Reproduction, method: str) -> Finding:
    curve = next(c for c in found.curves if c.loss != found.loss and c.method == method)
    reached = [m for e, m in zip(curve.epsilons, curve.means, strict=True) if e <= 10]
    best = max(reached, key=lambda m: _merit(found, m))
    share = _share(found, best, curve.loss)
    ends = (_number(found, found.reference(m, curve.loss).means[0]) for m in ("zero-shot", "non-private"))
    text = f"at best {share:.0%} of its gap: {_number(found, best)}, between {' and '.join(ends)}"
    return Finding("yes" if share < _COMPETITIVE else "better", text)


def _one_pass(found: Reproduction, method: str) -> Finding:
    passes = len({(c.loss, c.proj_dim) for c in found.curves if c.method == method})
    points = sum(len(c.epsilons) for c in found.curves if c.method == method)
    text = (
        f"{passes} passes, one for each subspace, gave {points * found.draws:,} candidates at {points} pairs of ε and R"
    )
    return Finding(_verdict(points > passes and found.draws > 1), text)


# --- drawing ---------------------------------------------------------------------------------------------------------

# Curves differ in marker and lightness, lines in dashes, so that they can be told apart in grey.
_CURVES = (
    {"color": "#c9a227", "marker": "v"},
    {"color": "#00796b", "marker": "o"},
    {"color": "#0b3c6f", "marker": "s"},
    {"color": "#b04a5a", "marker": "D"},
)
_OTHER_LOSS = {"color": "#7b3fa0", "marker": "*", "linestyle": (0, (3, 1.2)), "markersize": 7}
_LINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "zero-shot": ("zero-shot", {"color": "0.45", "linestyle": ":", "linewidth": 1.4}),
    "non-private": ("non-private", {"color": "0.1", "linestyle": (0, (8, 3)), "linewidth": 1.1}),
    "dp-sgd": ("DP-SGD, tuned, (ε, δ)", {"color": "0.3", "linestyle": "--", "marker": "^", "markersize": 4.5}),
    "dp-sgd-paper-rate": (
        "DP-SGD, paper's rate",
        {"color": "0.6", "linestyle": "-.", "marker": "x", "markersize": 4.5},
    ),
}
_TITLES = {
    "paper_not_private": "the paper's calibration and Gibbs sampler: NOT PRIVATE\n(bounds read off the private data)",
    "ours": "ours, range calibration and exact sampler: ε-DP a candidate\n(bounds from the public data)",
}


def _draw(found: Reproduction, kind: str, method: str, axes: Axes) -> None:
    """One panel."""
    shown: list[tuple[Curve, str, Mapping[str, Any]]] = [
        (c, f"R = {c.radius:g}" if kind == "radius" else f"k = {c.proj_dim}", style)
        for c, style in zip(found.figure(kind, method), _CURVES, strict=True)
    ]
    if kind == "radius":
        other = [c for c in found.curves if c.method == method and c.loss != found.loss]
        shown += [(c, f"R = {c.radius:g}, cross-entropy", _OTHER_LOSS) for c in other]
    for curve, label, style in shown:
        mean, std = np.array(curve.means), np.array(curve.stds)
        axes.plot(
            curve.epsilons, mean, label=label, **{"markersize": 4.5, "zorder": 3, "markeredgecolor": "white", **style}
        )
        axes.fill_between(curve.epsilons, mean - std, mean + std, color=style["color"], alpha=0.16, linewidth=0)
    for line in found.references:
        label, lined = _LINES[line.method]
        if line.loss != found.loss:
            if kind != "radius":
                continue
            label, lined = f"{label}, cross-entropy", {**lined, "color": _OTHER_LOSS["color"]}
        if line.epsilons:
            axes.plot(line.epsilons, line.means, label=label, zorder=2.5, **lined)
        else:
            axes.axhline(line.means[0], label=label, zorder=1.5, **lined)
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("privacy budget ε")
    axes.set_title(_TITLES[method], fontsize="small")
    axes.grid(True, color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _tuples(facts: Mapping[str, Any]) -> dict[str, Any]:
    """With lists, which JSON has, as tuples."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()}
