"""Experiments as data, model and pretraining: the source paper's three, its clinical one with open data."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from opacus_expm import _check, _files
from opacus_expm.experiments import datasets, downloads
from opacus_expm.experiments.datasets import Table
from opacus_expm.experiments.downloads import AnyPath
from opacus_expm.gathering.model import evaluation_mode


@dataclass(frozen=True)
class Task:
    """A pretrained model and the data sets around it.

    Attributes:
        model: pretrained on ``public``.
        public: pretraining data, free to use.
        private: data to fine-tune on.
        test: held-out data from the private distribution.
        criterion: the loss.
        name: what the task is called.
        metric: how a model is judged: ``"accuracy"``, in percent, or ``"loss"``, the criterion.
    """

    model: nn.Module
    public: TensorDataset
    private: TensorDataset
    test: TensorDataset
    criterion: nn.Module
    name: str = ""
    metric: str = "loss"

    def score(self, model: nn.Module) -> float:
        """The metric of a model on the test data, in evaluation mode."""
        return loss(model, self.test, self.criterion) if self.metric == "loss" else accuracy(model, self.test)


def sine(seed: int = 0, records: int = 5000) -> Task:
    """The paper's sinusoidal regression: a·sin(2πx₁) + b·x₂ + c on R⁵, with a shift between the two data sets.

    Pretraining has (a, b, c) = (1, 0.3, 0.25) and standard normal inputs; fine-tuning has (0.9, 0.35, 0.25) and
    x₁, x₂ ← 1.1(x + 0.1). The model is a 5-10-10-1 perceptron with ReLU, 181 parameters. So small a network often
    fails to find the sine at all, so pretraining starts afresh until its loss, on public data, is below 0.1.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(a: float, b: float, c: float, *, shifted: bool) -> TensorDataset:
        x = torch.randn(records, 5, generator=generator)
        if shifted:
            x[:, :2] = 1.1 * (x[:, :2] + 0.1)
        return TensorDataset(x, a * torch.sin(2 * math.pi * x[:, :1]) + b * x[:, 1:2] + c)

    public = draw(1.0, 0.3, 0.25, shifted=False)
    private = draw(0.9, 0.35, 0.25, shifted=True)
    test = draw(0.9, 0.35, 0.25, shifted=True)
    criterion = nn.MSELoss()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        while True:
            model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))
            fit(model, public, criterion, epochs=300, batch_size=500, learning_rate=2e-2)
            if loss(model, public, criterion) < 0.1:
                return Task(model, public, private, test, criterion, name="sine")


def mnist(
    seed: int = 0,
    *,
    data_dir: AnyPath | None = None,
    records: int = 20_000,
    loss: str = "cross_entropy",
) -> Task:
    """The paper's digits: pretraining on clean images of MNIST, fine-tuning on noisy ones.

    The public set is ``records`` training images, the private set as many others with Gaussian noise of standard
    deviation 0.5 on their pixel values in [0, 1]; the test set is MNIST's, with such noise. Pixels are then standardised
    with MNIST's usual mean and deviation, 0.1307 and 0.3081. The model is :func:`cnn`.

    Pretraining sees the public set only: 20 epochs of Adam in batches of 128, with a one-cycle learning rate of at most
    1e-3 and a weight decay, added to the gradient, of 1e-2 (4e-3 with ``"mse"``, whose gradients are smaller). The paper
    has 100 epochs in batches of 1024, a similar number of steps, at 1e-3 and 1e-2. It takes less than a minute on two
    cores; the weights are kept in the cache (``OPACUS_EXPM_CACHE``, else ``~/.cache/opacus_expm``). Before fine-tuning,
    about 86 (``"mse"``: 80) noisy and 98 (97) clean test images in a hundred are recognised; in the paper, 80.3 and 95.3.
    Weight decay decides how well noise is borne, and that of ``"mse"`` was chosen to come near the paper's figure.

    Args:
        seed: of the choice of images, the noise and the pretraining.
        data_dir: directory with ``mnist/``, looked into first; see :mod:`opacus_expm.experiments.downloads`.
        records: size of the public and of the private set, at most 30,000.
        loss: ``"cross_entropy"``, or ``"mse"`` between the outputs and one-hot targets.

    Returns:
        A task judged by its accuracy.

    Raises:
        FileNotFoundError: the data is neither there nor can it be downloaded.
    """
    _check.seed("seed", seed)
    _check.positive_int("records", records)
    _check.one_of("loss", loss, ("cross_entropy", "mse"))
    train_images, train_labels, test_images, test_labels = map(torch.tensor, datasets.mnist(data_dir))
    if 2 * records > len(train_images):
        raise ValueError(f"records must be at most half of the {len(train_images)} training images, got {records}")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(train_images), generator=generator)[: 2 * records]

    def prepare(images: Tensor, labels: Tensor, *, noisy: bool) -> TensorDataset:
        x = images[:, None] / 255
        if noisy:
            x += 0.5 * torch.randn(x.shape, generator=generator)
        y = labels.long()
        return TensorDataset((x - 0.1307) / 0.3081, y if loss == "cross_entropy" else F.one_hot(y, 10).float())

    public = prepare(train_images[chosen[:records]], train_labels[chosen[:records]], noisy=False)
    private = prepare(train_images[chosen[records:]], train_labels[chosen[records:]], noisy=True)
    test = prepare(test_images, test_labels, noisy=True)
    criterion = nn.CrossEntropyLoss() if loss == "cross_entropy" else nn.MSELoss()
    weight_decay = 1e-2 if loss == "cross_entropy" else 4e-3
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = cnn()

        # Twice as fast on a processor, in pretraining as in either engine.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def train() -> None:
            fit(model, public, criterion, epochs=20, batch_size=128, learning_rate=1e-3, weight_decay=weight_decay)

        _train_once(
            model, train, public, {"task": "mnist", "recipe": 1, "seed": seed, "records": records, "loss": loss}
        )
    return Task(model, public, private, test, criterion, name="mnist", metric="accuracy")


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


def cnn() -> nn.Module:
    """The paper's MNIST network: two 5×5 convolutions (24 and 8 channels), ReLU and max-pooling; 6,722 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 24, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 8, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def fit(
    model: nn.Module,
    dataset: TensorDataset,
    criterion: nn.Module,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float = 0.0,
) -> None:
    """Adam with a one-cycle learning rate, in place; not private.

    ``weight_decay`` λ adds λ‖θ‖²/2 to the loss. The order of records is drawn from PyTorch's global generator.
    """
    x, y = dataset.tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    steps = epochs * math.ceil(len(x) / batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, total_steps=steps)
    for _ in range(epochs):
        for index in torch.split(torch.randperm(len(x)), batch_size):
            optimizer.zero_grad()
            criterion(model(x[index]), y[index]).backward()
            optimizer.step()
            schedule.step()


def _train_once(model: nn.Module, train: Callable[[], None], dataset: TensorDataset, facts: dict[str, Any]) -> None:
    """Train a model in place, or take the weights found earlier with the same data and facts from the cache."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for tensor in dataset.tensors:
        digest.update(tensor.numpy().tobytes())
    kept = downloads.cache_dir() / "weights" / f"{facts['task']}-{digest.hexdigest()[:16]}.pt"
    start = copy.deepcopy(model.state_dict())
    try:
        model.load_state_dict(_files.load_tensors(kept))
        return
    except Exception:  # absent, or damaged in one of many ways
        model.load_state_dict(start)
    train()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    downloads.remember(kept, buffer.getvalue())


def loss(model: nn.Module, dataset: TensorDataset, criterion: nn.Module) -> float:
    """The criterion on a whole data set, in evaluation mode."""
    return float(criterion(_outputs(model, dataset), dataset.tensors[1]))


def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """How many records in a hundred are given their class, in evaluation mode.

    The class is the largest of several outputs, or the sign of a single one. Targets are numbers of classes or one-hot.
    """
    outputs, targets = _outputs(model, dataset), dataset.tensors[1]
    if outputs.shape[1] == 1:
        right = (outputs[:, 0] > 0) == (targets.reshape(-1) > 0.5)
    else:
        right = outputs.argmax(1) == (targets.argmax(1) if targets.dim() > 1 else targets)
    return 100 * float(right.double().mean())


@torch.no_grad()
def _outputs(model: nn.Module, dataset: TensorDataset) -> Tensor:
    """What a model says of all records, a few hundred at a time (what stays in cache), in evaluation mode."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with evaluation_mode(model):
        return torch.cat([model(x.to(device)).cpu() for x in torch.split(dataset.tensors[0], 250)])
