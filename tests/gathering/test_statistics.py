"""One pass as a whole: constant pieces, sampled curvature, sequences, and models from other libraries' conventions."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from reference import random_map, sums_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, GradSampling, Stiefel
from opacus_expm.gathering import clipping
from opacus_expm.gathering.clipping import record_quadratics
from opacus_expm.gathering.criteria import CrossEntropy
from opacus_expm.gathering.functional import FunctionalRows
from opacus_expm.gathering.hooks import hooks_for
from opacus_expm.gathering.model import working_copy
from opacus_expm.subspaces.layout import Layout

OPTIONS = {"projection": Stiefel(seed=3), "max_grad_norm": 0.5, "max_curvature": 0.3}


def gather(model, dataset, dim=6, *, batch_size=8, criterion=None, **options):
    loader = DataLoader(dataset, batch_size=batch_size)
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    return ExpMQuadEngine().gather(model, loader, dim, criterion=criterion, **{**OPTIONS, **options}).sums


def small_task(n=23, features=5, classes=3, dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, 7), nn.ReLU(), nn.Linear(7, classes)).to(dtype)
    return model, TensorDataset(torch.randn(n, features, dtype=dtype), torch.randint(classes, (n,)))


# --- constant pieces ------------------------------------------------------------------------------------------------


def test_the_network_always_sees_pieces_of_one_size():
    """A record's rounding must not depend on how many others share its batch, so short batches are filled up."""
    sizes = []

    class Watched(nn.Linear):
        def forward(self, x):
            sizes.append(len(x))
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), Watched(5, 3))
    _, dataset = small_task(n=23, dtype=torch.float32)
    for options in ({"batch_size": 10}, {"batch_size": 23}, {"batch_size": 10, "max_physical_batch_size": 4}):
        sizes.clear()
        gather(model, dataset, grad_sample_mode="functorch" if len(options) == 3 else None, **options)
        expected = {16} if options["batch_size"] == 10 else {32}
        passes = {s for s in sizes if s > 8}  # 1: under vmap; up to 8: synthetic batches
        assert passes in (expected, set())


def test_filling_up_changes_nothing():
    model, dataset = small_task()
    whole = gather(model, dataset, batch_size=23)
    for size in (1, 5, 22):
        cut = gather(model, dataset, batch_size=size)
        torch.testing.assert_close(cut.gradient, whole.gradient, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(cut.curvature, whole.curvature, rtol=1e-12, atol=1e-12)


def test_records_on_a_kink_do_not_move_when_another_leaves():
    """Pre-activations that cancel to rounding error flip a ReLU when a batch of one takes another matrix kernel."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 8, bias=False), nn.ReLU(), nn.Linear(8, 1))
    weight = model[0].weight.detach()
    x = torch.randn(24, 64, generator=generator)
    for _ in range(20):  # remove each record's component along the weights, down to rounding error
        x = x - (x @ weight.T) @ torch.linalg.pinv(weight.T)
    y = torch.randn(24, 1, generator=generator)
    options = {"batch_size": 2, "criterion": nn.MSELoss(), "max_grad_norm": 1e6, "max_curvature": 1e6}
    engine = [gather(model, TensorDataset(x[:n], y[:n]), **options) for n in (24, 23)]
    alone = gather(model, TensorDataset(x[23:], y[23:]), **options)
    torch.testing.assert_close(engine[0].gradient, engine[1].gradient + alone.gradient, rtol=1e-6, atol=1e-6)


# --- sampled curvature ----------------------------------------------------------------------------------------------


def _source(model, dataset, dim=4):
    working = working_copy(model)
    layout = Layout.of(working)
    projection = random_map("stiefel", layout.size, dim)
    return hooks_for(working, layout, projection, dataset.tensors[0][:1])


def _curvature(records):
    return torch.einsum("bqk,bql->kl", records.factors, records.factors)


def test_sampled_curvature_converges_to_the_exact_one():
    model, dataset = small_task()
    source, (x, y) = _source(model, dataset), dataset.tensors
    exact = record_quadratics(source, CrossEntropy(), x, y, curvature=True)
    errors = {}
    for samples in (4, 64, 4096):
        sampled = record_quadratics(source, CrossEntropy(), x, y, curvature=True, probes=samples)
        torch.testing.assert_close(sampled.gradients, exact.gradients, rtol=1e-10, atol=1e-12)
        errors[samples] = float((_curvature(sampled) - _curvature(exact)).norm() / _curvature(exact).norm())
    # The error falls like 1/√s: from 4 to 4096 probes by about 32, and a biased estimate would stay.
    assert errors[4096] < 0.02
    assert errors[4096] < errors[4] / 8


def test_a_biased_probe_would_be_noticed(monkeypatch):
    monkeypatch.setattr(clipping, "_signs", lambda shape: torch.ones(shape))
    model, dataset = small_task()
    source, (x, y) = _source(model, dataset), dataset.tensors
    exact = record_quadratics(source, CrossEntropy(), x, y, curvature=True)
    sampled = record_quadratics(source, CrossEntropy(), x, y, curvature=True, probes=512)
    assert (_curvature(sampled) - _curvature(exact)).norm() > 0.1 * _curvature(exact).norm()


def test_sampled_curvature_is_clipped_and_semidefinite():
    model, dataset = small_task(n=1)
    x, y = dataset.tensors
    source = _source(model, dataset)
    found = sums_of(source, CrossEntropy(), [(x, y)], max_grad_norm=1e-3, max_curvature=1e-4, probes=2)
    assert found.gradient.norm() == pytest.approx(1e-3, rel=1e-9)
    eigenvalues = torch.linalg.eigvalsh(found.curvature)
    assert eigenvalues[-1] == pytest.approx(1e-4, rel=1e-9)
    assert eigenvalues[0] >= -1e-18
    assert not found.parallel


def test_probes_are_fresh_whatever_the_seed():
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draws.append(clipping._signs((64,)))
    assert not torch.equal(*draws)
    assert set(torch.cat(draws).tolist()) == {-1, 1}


@pytest.mark.parametrize(("outputs", "backward_passes"), [(64, 63), (65, 1 + 8)])
def test_exact_up_to_64_outputs_and_8_probes_beyond(outputs, backward_passes):
    asked = []

    class Source:
        def outputs_and_pullback(self, inputs):
            def pullback(cotangents):
                asked.append(cotangents.shape[1])
                return torch.zeros(*cotangents.shape[:2], 2)

            return torch.zeros(len(inputs), outputs), pullback

    record_quadratics(Source(), CrossEntropy(), torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), curvature=True)
    assert asked == [backward_passes]


def test_the_number_of_probes_reaches_the_pass():
    """One record's curvature has no more rows than probes."""
    model, dataset = small_task(n=1)
    for probes in (1, 2):
        found = gather(model, dataset, grad_sample_mode=GradSampling(probes=probes))
        assert found.rank == probes
        assert 1 <= int(torch.linalg.matrix_rank(found.curvature)) <= probes


# --- sequences ------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A class for every token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.mix = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        hidden = torch.tanh(self.mix(self.embedding(tokens)))
        return self.head(hidden + hidden.mean(1, keepdim=True))


def tagged(n=9, positions=5):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(11, (n, positions), generator=generator)
    labels = torch.randint(3, (n, positions), generator=generator)
    labels[:, -1] = -100
    labels[0, 2:] = -100
    return tokens, labels


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_a_sequence_is_one_record(mode):
    """Gradient against autograd of the mean over the counted positions; curvature against the exact one, on average."""
    torch.manual_seed(4)
    model = Tagger().double()
    tokens, labels = tagged()
    working = working_copy(model)
    layout = Layout.of(working)
    projection = random_map("sparse", layout.size, 7)
    source = (
        hooks_for(working, layout, projection, tokens[:1])
        if mode == "hooks"
        else FunctionalRows(working, layout, projection)
    )
    found = record_quadratics(source, CrossEntropy(), tokens, labels, curvature=True, probes=3000)
    for i in range(len(tokens)):
        loss = F.cross_entropy(model(tokens[i : i + 1])[0], labels[i])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        expected = torch.zeros(1, 7, dtype=torch.float64)
        projection.add_projected(expected, gradient[None], 0)
        torch.testing.assert_close(found.gradients[i], expected[0], rtol=1e-9, atol=1e-12)
    lifted = torch.stack([projection.lift(e) for e in torch.eye(7, dtype=torch.float64)], 1)
    exact = torch.zeros(7, 7, dtype=torch.float64)
    for i in range(len(tokens)):
        counted = int((labels[i] != -100).sum())
        for t in range(tokens.shape[1]):
            if labels[i, t] == -100:
                continue
            output = model(tokens[i : i + 1])[0, t]
            rows = [torch.autograd.grad(o, list(model.parameters()), retain_graph=True) for o in output]
            jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]) @ lifted
            sigma = torch.softmax(output.detach(), 0)
            exact += jacobian.T @ (torch.diag(sigma) - torch.outer(sigma, sigma)) @ jacobian / counted
    assert (_curvature(found) - exact).norm() < 0.05 * exact.norm()


def test_sequences_through_the_engine():
    tokens, labels = tagged()
    engine = ExpMQuadEngine()
    model = Tagger()
    private = engine.make_private_expm(
        model,
        DataLoader(TensorDataset(tokens, labels), batch_size=4),
        1.0,
        0.5,
        6,
        criterion=nn.CrossEntropyLoss(),
        max_grad_norm=1.0,
        max_curvature=1.0,
        projection="sparse",
    )
    assert private(tokens).shape == (9, 5, 3)
    assert engine.get_epsilon() == 1.0
    with pytest.raises(ValueError, match=r"target has shape .* needs one target for each position"):
        gather(model, TensorDataset(tokens, labels[:, 0]))


# --- other conventions ----------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Called by keywords, returns an object with logits, as Hugging Face classifiers do; positions are broadcast."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 6, padding_idx=0)
        self.positions = nn.Embedding(8, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)
        self.register_buffer("ids", torch.arange(8)[None])

    def forward(self, input_ids, attention_mask):
        hidden = self.norm(self.words(input_ids) + self.positions(self.ids[:, : input_ids.shape[1]]))
        weights = attention_mask[..., None].to(hidden)
        pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        return SimpleNamespace(logits=self.head(pooled))


class Texts(torch.utils.data.Dataset):
    """Batches are mappings with ``labels``."""

    def __init__(self, n=19):
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(13, (n, 7), generator=generator)
        self.labels = torch.randint(3, (n,), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": (self.ids[i] > 0).long(), "labels": self.labels[i]}


def test_mappings_with_labels_and_results_with_logits():
    torch.manual_seed(6)
    model, texts = Classifier().double(), Texts()
    hooks = gather(model, texts, grad_sample_mode="hooks")
    functorch = gather(model, texts, grad_sample_mode="functorch")
    torch.testing.assert_close(hooks.gradient, functorch.gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(hooks.curvature, functorch.curvature, rtol=1e-9, atol=1e-12)
    assert hooks.gradient.norm() > 0.1


class Checkpointed(nn.Module):
    """Activation checkpointing around the body."""

    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def test_activation_checkpointing():
    torch.manual_seed(7)
    body, head = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 3)
    plain, checkpointed = nn.Sequential(body, head).double(), Checkpointed(body, head).double()
    _, dataset = small_task()
    expected = gather(plain, dataset)
    found = gather(checkpointed, dataset)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.curvature, expected.curvature, rtol=1e-10, atol=1e-12)


class ReadsValues(nn.Linear):
    """Python control flow on a value, which vmap cannot follow, and a weight used outside any layer."""

    def forward(self, x):
        scale = 2.0 if float(x.detach().abs().sum()) >= 0 else 1.0
        return F.linear(x, self.weight * scale, self.bias)


def test_what_vmap_cannot_run_is_run_one_by_one():
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), ReadsValues(4, 3)).double()
    _, dataset = small_task()
    found = gather(model, dataset, grad_sample_mode="functorch")
    x, y = dataset.tensors
    expected = sum(_clipped(model, x[i : i + 1], y[i : i + 1]) for i in range(len(x)))
    torch.testing.assert_close(found.gradient, expected, rtol=1e-9, atol=1e-12)


def _clipped(model, x, y):
    """One record's projected, clipped gradient by plain autograd."""
    layout = Layout.of(model)
    projection = random_map("stiefel", layout.size, 6, 3)
    gradient = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    projected = torch.zeros(1, 6, dtype=torch.float64)
    projection.add_projected(projected, torch.cat([g.flatten() for g in gradient])[None], 0)
    return projected[0] * min(1.0, 0.5 / float(projected.norm()))


class NotDifferentiable(nn.Module):
    """A layer that works, but not where it is to be differentiated."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        if torch.is_grad_enabled():
            raise NotImplementedError("no rule")
        return x * self.weight


def test_a_layer_that_nothing_can_serve_is_named():
    _, dataset = small_task()
    model = nn.Sequential(nn.Linear(5, 3), NotDifferentiable()).double()
    with pytest.raises(ValueError, match=r"layer '1' \(NotDifferentiable\) fails with .*; freeze that layer"):
        gather(model, dataset, grad_sample_mode="functorch")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_models_are_widened_for_the_statistics(dtype):
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).to(dtype)
    _, dataset = small_task(dtype=torch.float32)
    x, y = dataset.tensors
    found = gather(model, TensorDataset(x.to(dtype), y))
    expected = gather(copy.deepcopy(model).float(), TensorDataset(x.to(dtype).float(), y))
    torch.testing.assert_close(found.gradient, expected.gradient)
    torch.testing.assert_close(found.curvature, expected.curvature)
    assert {p.dtype for p in model.parameters()} == {dtype}
