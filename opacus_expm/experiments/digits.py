"""Digits: the source paper's task on MNIST, and one that is farther from what the model was pretrained on."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from opacus_expm import _check
from opacus_expm.experiments import datasets
from opacus_expm.experiments.downloads import AnyPath
from opacus_expm.experiments.task import Task, fit, train_once


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
    return _digits("mnist", seed, data_dir, records, loss, _noisy)


def mnist_far(seed: int = 0, *, data_dir: AnyPath | None = None, records: int = 20_000) -> Task:
    """Digits far from those of the pretraining: half of the private ones are mirrored, and all are paler and noisy.

    Public set and pretrained model are those of :func:`mnist` with the same seed. Each image of the private and of the test
    set is mirrored left to right with probability a half, its pixel values in [0, 1] are halved, and Gaussian noise of
    standard deviation 0.25 is added to them. Before fine-tuning, 53 to 57 test images in a hundred are recognised (seeds 0
    to 4). Without mirroring it would be 85 to 89, with mirroring alone 65 to 68.

    Args:
        seed: of the choice of images, the shift and the pretraining.
        data_dir: directory with ``mnist/``, looked into first; see :mod:`opacus_expm.experiments.downloads`.
        records: size of the public and of the private set, at most 30,000.

    Returns:
        A task judged by its accuracy.

    Raises:
        FileNotFoundError: the data is neither there nor can it be downloaded.
    """
    return _digits("mnist_far", seed, data_dir, records, "cross_entropy", _far)


def _noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    """Images with noise."""
    return x + 0.5 * torch.randn(x.shape, generator=generator)


def _far(x: Tensor, generator: torch.Generator) -> Tensor:
    """Images of which half are mirrored, at half the contrast, with noise."""
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    return 0.5 * x + 0.25 * torch.randn(x.shape, generator=generator)


def _digits(
    name: str,
    seed: int,
    data_dir: AnyPath | None,
    records: int,
    loss: str,
    shift: Callable[[Tensor, torch.Generator], Tensor],
) -> Task:
    """The network pretrained on clean digits, with private and test images that are shifted."""
    _check.seed("seed", seed)
    _check.positive_int("records", records)
    _check.one_of("loss", loss, ("cross_entropy", "mse"))
    train_images, train_labels, test_images, test_labels = map(torch.tensor, datasets.mnist(data_dir))
    if 2 * records > len(train_images):
        raise ValueError(f"records must be at most half of the {len(train_images)} training images, got {records}")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(train_images), generator=generator)[: 2 * records]

    def prepare(images: Tensor, labels: Tensor, *, shifted: bool) -> TensorDataset:
        x = images[:, None] / 255
        if shifted:
            x = shift(x, generator)
        y = labels.long()
        return TensorDataset((x - 0.1307) / 0.3081, y if loss == "cross_entropy" else F.one_hot(y, 10).float())

    public = prepare(train_images[chosen[:records]], train_labels[chosen[:records]], shifted=False)
    private = prepare(train_images[chosen[records:]], train_labels[chosen[records:]], shifted=True)
    test = prepare(test_images, test_labels, shifted=True)
    criterion = nn.CrossEntropyLoss() if loss == "cross_entropy" else nn.MSELoss()
    weight_decay = 1e-2 if loss == "cross_entropy" else 4e-3
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = cnn()

        # Twice as fast on a processor, in pretraining as in either engine.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def train() -> None:
            fit(model, public, criterion, epochs=20, batch_size=128, learning_rate=1e-3, weight_decay=weight_decay)

        # The pretraining is the same whatever the shift.
        train_once(model, train, public, {"task": "mnist", "recipe": 1, "seed": seed, "records": records, "loss": loss})
    return Task(model, public, private, test, criterion, name=name, metric="accuracy")


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
