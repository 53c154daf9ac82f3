"""Deaths in intensive care: the source paper's clinical task with open data, and with one's own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from opacus_expm import _check
from opacus_expm.experiments import datasets
from opacus_expm.experiments.datasets import Table
from opacus_expm.experiments.downloads import AnyPath
from opacus_expm.experiments.task import Task


def icu(seed: int = 0, *, data_dir: AnyPath | None = None, balanced: bool = True, loss: str = "logistic") -> Task:
    """The paper's deaths in intensive care with open data: pretraining on the eICU demo, fine-tuning on PhysioNet 2012.

    The paper fine-tunes on MIMIC-IV, from the hospital of PhysioNet 2012, after pretraining on the whole of eICU; both
    need credentials (see :func:`icu_from_csv`). Here the public set is the eICU demo, the private set are sets a and c
    of PhysioNet 2012 and the test set is its set b: 2,179, 8,000 and 4,000 stays, of which 9 and 14 in a hundred end in
    death. A record is one stay, not one patient: PhysioNet 2012 does not say which stays belong to the same one. All
    stays of the eICU demo are public, so none of its patients is on both sides.

    The features are the 21 variables in :data:`~opacus_expm.experiments.datasets.VARIABLES`, in the same units: the worst of
    the first day in eICU, the mean of the first two days in PhysioNet 2012, which is a part of the shift to learn. They are
    standardised with the public mean and deviation and cut off at ±5; a missing value is 0, the public mean.

    The model is linear, with one output and the logistic loss: the stay is predicted to end in death where the output
    is positive. A second output would change no prediction and double the parameters that noise is added to.
    Pretraining finds the minimum of the loss with the paper's weight decay, 0.1 (where the paper has 1,000 epochs).
    Balanced, about 67 in a hundred test stays are predicted right before fine-tuning, and 77 after it without privacy.

    Args:
        seed: of the choice of survivors.
        data_dir: directory with ``eicu_demo/`` and ``physionet2012/``, looked into first.
        balanced: as in the paper, keep only as many survivors as deaths, drawn at random, in each of the three sets:
            392, 2,278 and 1,136 stays. The task is then judged by its accuracy, otherwise by its loss.
        loss: ``"logistic"``, or the paper's ``"mse"``, between the output and −1 for survival, 1 for death.

    Returns:
        The task.

    Raises:
        FileNotFoundError: the data is neither there nor can it be downloaded.

    **Privacy:** balancing chooses records by looking at private labels. It belongs to the design of the experiment and
    is not covered by a guarantee on the balanced set.
    """
    _check.one_of("loss", loss, ("logistic", "mse"))
    sets = {letter: datasets.physionet2012(letter, data_dir) for letter in "abc"}
    private = Table(
        datasets.VARIABLES,
        np.concatenate([sets["a"].features, sets["c"].features]),
        np.concatenate([sets["a"].deaths, sets["c"].deaths]),
    )
    public = datasets.eicu_demo(data_dir)
    return _clinical("icu", public, private, sets["b"], seed=seed, balanced=balanced, squared=loss == "mse")


def icu_from_csv(
    public_csv: AnyPath,
    private_csv: AnyPath,
    test_csv: AnyPath,
    *,
    seed: int = 0,
    balanced: bool = True,
) -> Task:
    """The paper's deaths in intensive care with one's own extracts, such as eICU and MIMIC-IV; otherwise as :func:`icu`.

    Each file is CSV in UTF-8, gzip or not, with a header and one row a stay::

        mortality,age,heart_rate,lactate
        0,63,88,1.2
        1,79,104,

    ``mortality`` is 0 or 1. Every other column is a feature: a number, or empty where it is missing. The names are free,
    but the three files must have the same ones. Use the same units in all three, code categories as numbers, and leave
    out identifiers. Put all stays of a patient on one side.

    Args:
        public_csv: stays to pretrain on; their mean and deviation standardise all three.
        private_csv: stays to fine-tune on.
        test_csv: held-out stays from where the private ones come.
        seed: of the choice of survivors.
        balanced: keep only as many survivors as deaths, drawn at random, in each file, and judge by accuracy;
            otherwise all stays, judged by loss.

    Raises:
        ValueError: names the file, and the column and line where something else was found.

    **Privacy:** as for :func:`icu`. Nothing is written to the cache.
    """
    public = datasets.table(public_csv)
    private, test = (datasets.table(path, public.columns) for path in (private_csv, test_csv))
    return _clinical("icu_from_csv", public, private, test, seed=seed, balanced=balanced)


def _clinical(
    name: str, public: Table, private: Table, test: Table, *, seed: int, balanced: bool, squared: bool = False
) -> Task:
    """A linear model of deaths, pretrained."""
    _check.seed("seed", seed)
    generator = np.random.default_rng(seed)
    shift, scale = _scaling(public)

    def prepare(role: str, table: Table) -> TensorDataset:
        rows = np.arange(len(table.deaths))
        if balanced:
            died, survived = rows[table.deaths], rows[~table.deaths]
            if not 0 < len(died) <= len(survived):
                raise ValueError(
                    f"the {role} set must have at least one death and no fewer survivors to be balanced, got {len(died)} "
                    f"deaths and {len(survived)} survivors; pass balanced=False"
                )
            rows = np.sort(np.concatenate([died, generator.choice(survived, len(died), replace=False)]))
        x = np.nan_to_num(np.clip((table.features[rows] - shift) / scale, -5, 5), nan=0.0)
        y = torch.tensor(table.deaths[rows])[:, None].float()
        return TensorDataset(torch.tensor(x, dtype=torch.float32), 2 * y - 1 if squared else y)

    tensors = prepare("public", public), prepare("private", private), prepare("test", test)
    criterion = nn.MSELoss() if squared else nn.BCEWithLogitsLoss()
    with torch.random.fork_rng(devices=[]):
        model = nn.Linear(len(public.columns), 1)
    _solve(model, tensors[0], criterion, weight_decay=0.1)
    return Task(model, *tensors, criterion=criterion, name=name, metric="accuracy" if balanced else "loss")


def _scaling(table: Table) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and deviation of each feature, without missing values."""
    for name, column in zip(table.columns, table.features.T, strict=True):
        if len(np.unique(column[~np.isnan(column)])) < 2:
            raise ValueError(
                f"column {name!r} of the public set must have two different values or more to be standardised with; "
                "leave it out of all three sets"
            )
    return np.nanmean(table.features, axis=0), np.nanstd(table.features, axis=0)


def _solve(model: nn.Linear, dataset: TensorDataset, criterion: nn.Module, *, weight_decay: float) -> None:
    """The minimum of a convex loss plus λ‖θ‖²/2, in place."""
    x, y = (tensor.double() for tensor in dataset.tensors)
    model.double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = sum((parameter.square().sum() for parameter in model.parameters()), x.new_zeros(()))
        value: Tensor = criterion(model(x), y) + weight_decay / 2 * penalty
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    model.float()
