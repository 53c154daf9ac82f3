"""A regression with 40 records and 21 parameters, on which the engine is tested; no tests here."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from opacus_expm import ExpMQuadEngine, Sparse

FEATURES, HIDDEN, RECORDS = 3, 4, 40
PARAMETERS = (FEATURES + 1) * HIDDEN + HIDDEN + 1
GOOD = {"criterion": nn.MSELoss(), "max_grad_norm": 1.0, "max_curvature": 1.0, "projection": Sparse(seed=0)}


def make_model(dtype=torch.float32):
    """A pretrained network with one output, 21 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    return model.to(dtype)


def make_tensors(dtype=torch.float32, seed=0, records=RECORDS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, FEATURES, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(records, 1, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def make_loader(dtype=torch.float32, seed=0, records=RECORDS, batch_size=16):
    return DataLoader(TensorDataset(*make_tensors(dtype, seed, records)), batch_size=batch_size)


def gathered(model=None, loader=None, proj_dim=5, dtype=torch.float64, **changes):
    """Statistics of the usual problem, in float64 unless told otherwise."""
    model = make_model(dtype) if model is None else model
    loader = make_loader(dtype) if loader is None else loader
    return ExpMQuadEngine().gather(model, loader, proj_dim, **(GOOD | changes))


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def same(first, second):
    """Whether two modules have the same parameters, bit by bit."""
    return torch.equal(flat(first), flat(second))


class Stream(IterableDataset):
    """The usual records without a length."""

    def __iter__(self):
        return iter(zip(*make_tensors(torch.float64), strict=True))


class Counted(Dataset):
    """Counts how often records are read."""

    def __init__(self):
        self.tensors, self.reads = make_tensors(torch.float64), 0

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        self.reads += 1
        return tuple(t[index] for t in self.tensors)


class Untouchable(Dataset):
    """Private records that must not be read."""

    def __init__(self, records=RECORDS):
        self.records = records

    def __len__(self):
        return self.records

    def __getitem__(self, index):
        raise AssertionError("the private data was touched")


class Weighted(nn.Module):
    """A layer with two inputs, which hooks cannot serve."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, first, second):
        return (first * second * self.weight).sum(1, keepdim=True)


class Squared(nn.Module):
    """A weighted sum of squares."""

    def __init__(self):
        super().__init__()
        self.form = Weighted()

    def forward(self, x):
        return self.form(x, x)


def trace(module):
    """Everything about a module that a failed call must leave alone."""
    return (
        {name: value.clone() for name, value in module.state_dict().items()},
        {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()},
        {name: p.requires_grad for name, p in module.named_parameters()},
        {name: m.training for name, m in module.named_modules()},
        {name: sorted(vars(m)) for name, m in module.named_modules()},
        sum(len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in module.modules()),
    )


def equal_traces(first, second):
    same_state = all(torch.equal(v.nan_to_num(), second[0][k].nan_to_num()) for k, v in first[0].items())
    same_grads = all((g is None) == (second[1][k] is None) for k, g in first[1].items()) and all(
        torch.equal(g, second[1][k]) for k, g in first[1].items() if g is not None
    )
    return same_state and same_grads and first[0].keys() == second[0].keys() and first[2:] == second[2:]


def give_gradients(module):
    for p in module.parameters():
        p.grad = torch.full_like(p, 0.5)
