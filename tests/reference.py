"""The slow, obvious twin of the statistics pass, and the models on which the fast one is compared with it.

One record at a time, plain autograd, float64, dense matrices: the twin shares no code with the package. Maps and passes of
the package that several tests need are put together at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils import _pytree as pytree

from opacus_expm.gathering import clipping
from opacus_expm.gathering.clipping import ClippedAdder, ClippedSums
from opacus_expm.subspaces import Projection, Sparse, Stiefel, Structured

# ---------------------------------------------------------------------------------------------------- the twin


def dense(projection: Any) -> Tensor:
    """A as a float64 matrix (p, k), column by column."""
    unit = torch.eye(projection.dim, dtype=torch.float64)
    return torch.stack([projection.lift(e).double() for e in unit], dim=1)


def wide(values: Any) -> Any:
    """Floating tensors in float64."""
    return pytree.tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, values)


def one_by_one(inputs: Any, count: int) -> Iterator[Any]:
    """The records of a batch, each as a batch of one."""
    for i in range(count):
        yield pytree.tree_map(lambda t, i=i: t[i : i + 1] if isinstance(t, Tensor) else t, inputs)


def output_and_jacobian(module: nn.Module, record: Any) -> tuple[Tensor, Tensor]:
    """f (m,) and ∂f/∂θ (m, p) of one record; θ in the order of ``parameters()``, float64, evaluation mode."""
    module = copy.deepcopy(module).double().eval()
    parameters = [p for p in module.parameters() if p.requires_grad]
    record = wide(record)
    if isinstance(record, dict):
        result = module(**record)
    elif isinstance(record, tuple | list):
        result = module(*record)
    else:
        result = module(record)
    f = getattr(result, "logits", result)[0]
    rows = [torch.autograd.grad(f_j, parameters, retain_graph=True, materialize_grads=True) for f_j in f]
    return f.detach(), torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def output_and_jacobian_of_each(module: nn.Module, inputs: Any, count: int) -> list[tuple[Tensor, Tensor]]:
    """``output_and_jacobian`` of every record of a batch."""
    return [output_and_jacobian(module, record) for record in one_by_one(inputs, count)]


def gradient_and_hessian(criterion: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """∇_f ℓ (m,) and ∇²_f ℓ (m, m) of one record, negative eigenvalues set to 0; NaN where torch has no loss."""

    def loss(output: Tensor) -> Tensor:
        return criterion(output[None], wide(y)[None])

    try:
        gradient = torch.autograd.functional.jacobian(loss, f).reshape(f.shape)
        hessian = torch.autograd.functional.hessian(lambda o: loss(o).reshape(()), f)
    except IndexError:  # a class that does not exist
        return torch.full_like(f, torch.nan), f.new_full((len(f), len(f)), torch.nan)
    if not hessian.isfinite().all():
        return gradient, hessian
    values, vectors = torch.linalg.eigh(hessian)
    return gradient, vectors @ torch.diag(values.clamp(min=0)) @ vectors.T


@dataclass(frozen=True)
class Quadratic:
    """g = AᵀJᵀ∇ℓ and H = AᵀJᵀLJA of one record, with |g| and ‖H‖₂; all zero where g or H is not finite."""

    g: Tensor
    h: Tensor
    g_norm: float
    h_norm: float


def quadratic(jacobian: Tensor, gradient: Tensor, hessian: Tensor, a: Tensor) -> Quadratic:
    """One record's projected quadratic."""
    j = jacobian @ a
    g, h = j.T @ gradient, j.T @ hessian @ j
    if not (g.isfinite().all() and h.isfinite().all()):
        return Quadratic(torch.zeros_like(g), torch.zeros_like(h), 0.0, 0.0)
    return Quadratic(g, h, float(g.norm()), max(0.0, float(torch.linalg.eigvalsh(h)[-1])))


def quadratics(
    module: nn.Module, criterion: Callable[..., Tensor], inputs: Any, targets: Tensor, a: Tensor
) -> list[Quadratic]:
    """Every record's projected quadratic."""
    passed = output_and_jacobian_of_each(module, inputs, len(targets))
    return [quadratic(j, *gradient_and_hessian(criterion, f, y), a) for (f, j), y in zip(passed, targets, strict=True)]


def add_clipped(records: list[Quadratic], max_grad_norm: float, max_curvature: float) -> tuple[Tensor, Tensor]:
    """G = Σ g·min(1, C_g/|g|) and S = Σ H·min(1, C_H/‖H‖₂)."""
    g, s = torch.zeros_like(records[0].g), torch.zeros_like(records[0].h)
    for record in records:
        g += record.g * (min(1.0, max_grad_norm / record.g_norm) if record.g_norm > 0 else 1.0)
        s += record.h * (min(1.0, max_curvature / record.h_norm) if record.h_norm > 0 else 1.0)
    return g, s


def clipped_sums(
    module: nn.Module,
    criterion: Callable[..., Tensor],
    inputs: Any,
    targets: Tensor,
    a: Tensor,
    max_grad_norm: float,
    max_curvature: float,
) -> tuple[Tensor, Tensor]:
    """G and S of a data set."""
    return add_clipped(quadratics(module, criterion, inputs, targets, a), max_grad_norm, max_curvature)


def error(found: Tensor, expected: Tensor) -> float:
    """Largest deviation relative to the largest expected entry."""
    scale = float(expected.abs().max())
    return float((found.double() - expected.double()).abs().max()) / (scale if scale > 0 else 1.0)


# ------------------------------------------------------------------------------------------------- the criteria

LOSSES: dict[str, nn.Module] = {
    "mse": nn.MSELoss(),
    "ce": nn.CrossEntropyLoss(),
    "bce": nn.BCEWithLogitsLoss(),
}


def targets_for(loss: str, count: int, outputs: int) -> Tensor:
    """Targets that suit a loss."""
    generator = torch.Generator().manual_seed(5)
    if loss == "ce":
        return torch.randint(outputs, (count,), generator=generator)
    if loss == "bce":
        return torch.randint(2, (count, outputs), generator=generator).double()
    return torch.randn(count, outputs, generator=generator, dtype=torch.float64)


# --------------------------------------------------------------------------------------------------- the models


class Pooled(nn.Module):
    """Mean over the positions of a sequence (B, T, d), then a linear head."""

    def __init__(self, body: nn.Module, width: int, outputs: int = 3):
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


class LastState(nn.Module):
    """A recurrent layer's last hidden state, then a linear head."""

    def __init__(self, recurrent: nn.Module, width: int):
        super().__init__()
        self.recurrent = recurrent
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class TiedLayers(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class ReusedLayer(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.head(x)


class TiedEmbedding(nn.Module):
    """An embedding whose weight also gives the output: used behind the back of any hook."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(3, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.mix(self.embedding(tokens).mean(1))), self.embedding.weight)


class BehindTheBack(nn.Module):
    """A layer that is called, and whose weight is used once more without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(torch.tanh(self.layer(x)), self.layer.weight))


class NeverCalled(nn.Module):
    """A layer that is never called: only its weight is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias)


class RootParameter(nn.Module):
    """A parameter of the root module, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x * self.scale))


class LowRank(nn.Module):
    """A frozen layer with a trainable low-rank correction."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class CalledByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(input=x)))


class Unused(nn.Module):
    """A layer that is never called, and one whose result is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.lost, self.head = (nn.Linear(4, n) for n in (4, 2, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.lost(h)
        return self.head(h)


class UnusedCall(nn.Module):
    """A layer called on inputs of different lengths, and one of the results thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x[:, :2])
        return self.head(torch.tanh(self.layer(x)).mean(1) + torch.tanh(self.layer(x[:, 0])))


class ReusedConvolution(nn.Module):
    """A convolution with few outputs called on images of different sizes, and one of the results thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x[..., :3])
        return self.head(torch.tanh(self.layer(x)).mean((2, 3)) + torch.tanh(self.layer(x[..., 1:])).mean((2, 3)))


class UnusedLookup(nn.Module):
    """The same with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        self.embedding(tokens[:, :2])
        return self.head(torch.tanh(self.embedding(tokens)).mean(1) + self.embedding(tokens[:, 0]))


class Grid(nn.Module):
    """An embedding of a grid of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens.reshape(-1, 2, 3))).mean((1, 2)))


class WithPositions(nn.Module):
    """Token and position embeddings; the positions are looked up once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position, self.head = nn.Embedding(6, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.head(torch.tanh(self.token(tokens) + self.position(positions)).mean(1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 4), nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(x) * self.right(token)))


class NamedInputs(TwoInputs):
    """Called by name, with an optional input; answers as Hugging Face models do."""

    def forward(self, token: Tensor, x: Tensor, mask: Tensor | None = None) -> SimpleNamespace:
        h = torch.tanh(self.left(x) * self.right(token))
        return SimpleNamespace(logits=self.head(h if mask is None else h * mask))


class SequenceFirst(nn.Module):
    """Layers that see (T, B, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x.transpose(0, 1))).mean(0))


class FoldedPositions(nn.Module):
    """A layer that sees (B·T, d): every position a row of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return self.head(torch.tanh(self.layer(x.reshape(-1, width))).reshape(batch, length, width).mean(1))


class MinusBatchMean(nn.Module):
    """Mixes the records of a batch, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        return self.head(h - h.mean(0))


class TokensMinusBatchMean(nn.Module):
    """Mixes the records of a batch of tokens, whose order does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens.reshape(len(tokens), -1)).mean(1)
        return self.head(h - h.mean(0))


class Shift(nn.Module):
    """A layer of a kind that nobody has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class InPlaceInput(nn.Module):
    """Changes the input of a layer after the layer has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.head = Shift(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        h = self.shift(x)
        x.zero_()
        return self.head(torch.tanh(h))


class LogInput(nn.Module):
    """Defined for positive inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.log(x))


class Columns(nn.Module):
    """One floating table whose last column holds a category."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x[:, :4], self.embedding(x[:, 4].long())], 1))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, 4, mode="mean"), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bag(tokens)))


def perceptron(*widths: int, bias: bool = True) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers = [nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1])


def headed(layer: nn.Module, features: int, between: nn.Module | None = None) -> nn.Sequential:
    """A layer, an activation, and a linear head on all its features."""
    return nn.Sequential(layer, nn.Tanh() if between is None else between, nn.Flatten(), nn.Linear(features, 3))


def frozen(module: nn.Module, *names: str) -> nn.Module:
    """The module with some of its parameters frozen."""
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def frozen_body(module: Pooled) -> Pooled:
    """Only the head may move."""
    module.body.requires_grad_(False)
    return module


def torch_attention() -> nn.Module:
    return nn.MultiheadAttention(4, 2, batch_first=True)


def biased_attention() -> nn.Module:
    """Opacus's attention, whose extra biases see the sequence first."""
    return DPMultiheadAttention(4, 2, add_bias_kv=True, batch_first=True)


def transformer() -> nn.Module:
    """With a dropout that evaluation mode must silence."""
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.3, batch_first=True)


def shared_layer() -> nn.Module:
    """One layer in two places of the module tree."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer, nn.Tanh()), nn.Linear(4, 3))


def used(norm: nn.modules.batchnorm._BatchNorm) -> nn.Module:
    """BatchNorm whose running statistics and weights are not the initial ones."""
    norm.running_mean = torch.randn(norm.num_features)
    norm.running_var = 0.5 + torch.rand(norm.num_features)
    return affine(norm)


def used_batch_norm() -> nn.Module:
    """A convolutional network with BatchNorm."""
    pooled = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(2, 4, 3), used(nn.BatchNorm2d(4)), pooled, nn.Linear(4, 3))


def affine(module: nn.Module) -> nn.Module:
    """The module with normal weights in its one-dimensional parameters, which start as 0 and 1."""
    for p in module.parameters():
        if p.dim() == 1:
            nn.init.normal_(p)
    return module


# --------------------------------------------------------------------------------------------------- the inputs


def numbers(*shape: int) -> Callable[[int], Tensor]:
    """Normal inputs."""
    return lambda count: torch.randn(count, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def tokens(length: int, vocabulary: int = 6) -> Callable[[int], Tensor]:
    """Sequences of indices; length 0 stands for one index without a sequence."""
    shape = (length,) if length else ()
    return lambda count: torch.randint(vocabulary, (count, *shape), generator=torch.Generator().manual_seed(4))


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the gatherers that can serve it.

    Attributes:
        name: for test ids.
        build: a fresh model.
        inputs: a batch of the given number of records.
        outputs: m.
        hooks: whether Opacus's hooks can serve it.
        losses: the losses that suit m.
        batching_rules: whether torch has a batching rule for every operation; without, it is slow and says so.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    outputs: int = 3
    hooks: bool = True
    losses: tuple[str, ...] = tuple(LOSSES)
    batching_rules: bool = True

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The same weights every time, in evaluation mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return self.build().to(dtype).eval()

    def batch(self, count: int, dtype: torch.dtype = torch.float64) -> Any:
        """Inputs of ``count`` records."""
        return pytree.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, self.inputs(count))


CASES = [
    # Layers that Opacus has functions for.
    Case("linear", lambda: nn.Linear(5, 3), numbers(5)),
    Case("one-output", lambda: perceptron(4, 5, 1), numbers(4), outputs=1, losses=("mse", "bce")),
    Case("two-outputs", lambda: perceptron(4, 5, 2), numbers(4), outputs=2),
    Case("mlp", lambda: perceptron(4, 6, 5, 3), numbers(4)),
    Case("bias-free", lambda: perceptron(4, 6, 3, bias=False), numbers(4)),
    Case("positions", lambda: Pooled(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), 5), numbers(6, 4)),
    Case("cnn", lambda: headed(nn.Conv2d(1, 3, 3), 12, nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))), numbers(1, 6, 6)),
    Case("conv-strided", lambda: headed(nn.Conv2d(2, 3, (3, 2), stride=(2, 1)), 24), numbers(2, 5, 5)),
    Case("conv-dilated", lambda: headed(nn.Conv2d(1, 3, 3, dilation=(2, 1), stride=2), 12), numbers(1, 8, 6)),
    Case("conv-grouped", lambda: headed(nn.Conv2d(4, 6, 3, groups=2), 24), numbers(4, 4, 4)),
    Case("conv-depthwise", lambda: headed(nn.Conv2d(3, 6, 3, groups=3, bias=False), 24), numbers(3, 4, 4)),
    Case("conv-padded", lambda: headed(nn.Conv2d(1, 3, 3, padding=(1, 2)), 45), numbers(1, 3, 3)),
    Case("conv-same", lambda: headed(nn.Conv2d(1, 3, 3, padding="same", dilation=(1, 2)), 36), numbers(1, 4, 3)),
    Case("conv-circular", lambda: headed(nn.Conv2d(1, 3, 3, padding=1, padding_mode="circular"), 27), numbers(1, 3, 3)),
    Case("conv1d", lambda: headed(nn.Conv1d(2, 4, 3, stride=2, padding=1), 8, nn.MaxPool1d(2)), numbers(2, 8)),
    Case("conv3d", lambda: headed(nn.Conv3d(1, 2, 2, padding=(1, 0, 0), stride=(1, 2, 1)), 32), numbers(1, 3, 4, 3)),
    Case("group-norm", lambda: affine(headed(nn.Conv2d(1, 4, 3), 16, nn.GroupNorm(2, 4))), numbers(1, 4, 4)),
    Case("layer-norm", lambda: affine(Pooled(nn.Sequential(nn.LayerNorm(4), nn.Tanh()), 4)), numbers(3, 4)),
    Case("instance-norm", lambda: affine(headed(nn.InstanceNorm1d(2, affine=True), 12)), numbers(2, 6)),
    Case("rms-norm", lambda: affine(headed(nn.Linear(4, 5), 5, nn.RMSNorm(5))), numbers(4)),
    Case("batch-norm", used_batch_norm, numbers(2, 5, 5)),
    Case("batch-norm-flat", lambda: affine(headed(nn.Linear(4, 5), 5, used(nn.BatchNorm1d(5)))), numbers(4)),
    Case("embedding", lambda: Pooled(nn.Sequential(nn.Embedding(6, 4), nn.Tanh()), 4), tokens(5)),
    Case("embedding-one-token", lambda: headed(nn.Embedding(6, 4), 4), tokens(0)),
    Case("embedding-padded", lambda: Pooled(nn.Embedding(6, 4, padding_idx=5), 4), tokens(5)),
    Case("embedding-grid", Grid, tokens(6)),
    Case("embedding-positions", WithPositions, tokens(5)),
    Case("dp-lstm", lambda: LastState(DPLSTM(3, 4, batch_first=True), 4), numbers(5, 3)),
    Case("dp-gru", lambda: LastState(DPGRU(2, 3, 2, bidirectional=True, batch_first=True), 6), numbers(4, 2)),
    Case("dp-attention", lambda: Pooled(Attention(DPMultiheadAttention(4, 2, batch_first=True)), 4), numbers(5, 4)),
    # Other layers, and models that use their parameters in unusual ways.
    Case("conv-transposed", lambda: headed(nn.ConvTranspose2d(2, 3, 2, stride=2), 48), numbers(2, 2, 2)),
    Case("unregistered", lambda: nn.Sequential(nn.Linear(4, 4), Shift(), nn.Tanh(), nn.Linear(4, 3)), numbers(4)),
    Case("root-parameter", RootParameter, numbers(4)),
    Case("parametrized", lambda: headed(weight_norm(nn.Linear(4, 5)), 5), numbers(4), batching_rules=False),
    Case("partly-frozen", lambda: frozen(perceptron(4, 6, 5, 3), "0.weight", "0.bias", "2.weight"), numbers(4)),
    Case("low-rank", LowRank, numbers(5)),
    Case("batch-norm-frozen", lambda: frozen(used_batch_norm(), "1.weight", "1.bias"), numbers(2, 5, 5)),
    Case("tied-layers", TiedLayers, numbers(4)),
    Case("reused-layer", ReusedLayer, numbers(4)),
    Case("shared-layer", shared_layer, numbers(4)),
    Case("in-place", lambda: headed(nn.Conv2d(1, 3, 3), 27, nn.ReLU(inplace=True)), numbers(1, 5, 5)),
    Case("in-place-view", lambda: Pooled(nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True)), 5), numbers(6, 4)),
    Case("keyword", CalledByKeyword, numbers(4)),
    Case("unused", Unused, numbers(4)),
    Case("unused-call", UnusedCall, numbers(5, 4)),
    Case("reused-convolution", ReusedConvolution, numbers(2, 4, 4)),
    Case("unused-lookup", UnusedLookup, tokens(5)),
    Case("two-inputs", TwoInputs, lambda n: (numbers(4)(n), tokens(0)(n))),
    Case("named-inputs", NamedInputs, lambda n: {"x": numbers(4)(n), "token": tokens(0)(n)}),
    # What hooks cannot serve.
    Case("lstm", lambda: LastState(nn.LSTM(3, 4, batch_first=True), 4), numbers(5, 3), hooks=False),
    Case("attention", lambda: Pooled(Attention(torch_attention()), 4), numbers(5, 4), hooks=False),
    Case("attention-frozen", lambda: frozen_body(Pooled(Attention(torch_attention()), 4)), numbers(5, 4)),
    Case("dp-attention-bias", lambda: Pooled(Attention(biased_attention()), 4), numbers(5, 4), hooks=False),
    Case("transformer", lambda: Pooled(transformer(), 4), numbers(5, 4), hooks=False),
    Case("embedding-bag", Bag, tokens(5), hooks=False, batching_rules=False),
    Case("tied-embedding", TiedEmbedding, tokens(5, vocabulary=3), hooks=False),
    Case("in-place-input", InPlaceInput, numbers(4), hooks=False),
    Case("sequence-first", SequenceFirst, numbers(5, 4), hooks=False),
    Case("folded-positions", FoldedPositions, numbers(5, 4), hooks=False),
    Case("behind-the-back", BehindTheBack, numbers(4), hooks=False),
    Case("never-called", NeverCalled, numbers(4), hooks=False),
    Case("minus-batch-mean", MinusBatchMean, numbers(4), hooks=False),
    Case("tokens-minus-batch-mean", TokensMinusBatchMean, tokens(5), hooks=False),
    Case("one-token-minus-batch-mean", TokensMinusBatchMean, tokens(0), hooks=False),
    # Inputs that synthetic ones cannot stand for: whether hooks serve them cannot be checked.
    Case("log-input", LogInput, lambda n: numbers(4)(n).exp(), hooks=False),
    Case("columns", Columns, lambda n: torch.cat([numbers(4)(n), tokens(0)(n)[:, None]], 1), hooks=False),
]
CASE = {case.name: case for case in CASES}


# ------------------------------------------------------------------------------------ maps and passes of the package

CPU = torch.device("cpu")


def flat(size: int) -> tuple[torch.Size, ...]:
    """The shape of so many parameters in one vector."""
    return (torch.Size([size]),)


def random_map(
    kind: str,
    shapes: int | Sequence[torch.Size],
    dim: int | None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Projection:
    """A map that needs no public data, by its recipe or ``"full"``, of so many parameters or of these shapes."""
    recipe = {"stiefel": Stiefel, "structured": Structured}.get(kind, Sparse)(seed)
    shapes = flat(shapes) if isinstance(shapes, int) else shapes
    return recipe.build(shapes, None if kind == "full" else dim, CPU, dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers from a seed, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projected(projection: Projection, rows: Tensor, cuts: list[int]) -> Tensor:
    """Aᵀ(rows), in blocks that end at the given places."""
    out = torch.zeros(len(rows), projection.width, dtype=rows.dtype)
    for start, stop in pairwise([0, *cuts, rows.shape[1]]):
        projection.add_projected(out, rows[:, start:stop], start)
    return projection.finish(out)


def looked_up(values: Tensor, index: Tensor, start: int, size: int) -> Tensor:
    """Rows (N, size) in which the table at ``start`` has ``values[n, t]`` at row ``index[n, t]``; equal indices add up."""
    whole, width = torch.zeros(len(values), size, dtype=values.dtype), values.shape[2]
    for n, (places, rows) in enumerate(zip(index, values, strict=True)):
        for place, row in zip(places, rows, strict=True):
            at = start + int(place) * width
            whole[n, at : at + width] += row
    return whole


def sums_of(
    source: Any, criterion: Any, batches: Any, *, max_grad_norm: float, max_curvature: float, **options: Any
) -> ClippedSums:
    """The package's clipped sums over batches, from a gatherer, without a workbench."""
    total = ClippedAdder(max_grad_norm, max_curvature)
    for inputs, targets in batches:
        records = clipping.record_quadratics(source, criterion, inputs, targets, curvature=max_curvature > 0, **options)
        total.add(records)
    return total.result()
