"""DP-SGD in this engine's own metric, so that what geometry gains and what the mechanism gains can be told apart.

The method ``metric`` of the suite. As in DP-KFC, gradients are measured in Kronecker factors K of their layers before they
are clipped, and a step is θ ← θ − η·K(Σ_i clip(K g_i, C) + σC z)/(qn) with momentum: Opacus's DP-SGD in other units. Metric
and clipping norm are those of ``ours``, bought by the engine's own code for the same prices. All of the budget that ours
spends on directions, losses and its last choice goes to the noise of the steps.

* Batches of 5 % of the records, ten epochs, momentum 0.9, as most settings of ``free`` have them.
* The clipping norm is C, as ours has it: half of a private 85 % quantile of the gradients' norms in the metric.
* Learning rates are ``RATES``, or ``FEW_RATES`` where a run takes a minute, in units of 1/h₀. By h₀ the loss curves at most
  in these units, as far as the metric knows. The rate with the best mean *test* score is taken, for free: an oracle in
  DP-SGD's favour, as with ``free``.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.suite.ours import BATCH, rule_of, shares
from benchmarks.suite.rivals import DELTA, batch_size, best_of, schedule, task_of
from opacus_expm import ExpMQuadEngine
from opacus_expm.accounting.composition import gaussian_total, least_noise, total_epsilon
from opacus_expm.accounting.events import Query
from opacus_expm.baselines import noisy_sgd
from opacus_expm.books import Books
from opacus_expm.experiments.journal import Facts, Journal, canonical
from opacus_expm.experiments.methods import Grid, Settings, combinations
from opacus_expm.experiments.tasks import Task
from opacus_expm.gathering.factors import blocks_of
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.learned import LearnedRounds
from opacus_expm.rule import Rule
from opacus_expm.subspaces.layout import Layout
from opacus_expm.subspaces.metric import Block, MetricMap
from opacus_expm.subspaces.sparse import Sparse

RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
FEW_RATES = RATES[2:6]  # where a run takes a minute
GradSamples = dict[nn.Parameter, Tensor]
BOUGHT = ("metric", "scale", "bound")  # what is asked of the records before the first step


class MetricOptimizer(DPOptimizer):  # type: ignore[misc]
    """Opacus's optimizer, for gradients in a metric: steps are brought back to the parameters after the noise.

    Momentum is Opacus's own. The map is linear and stays the same, so it is also momentum in the metric.

    Args:
        optimizer: Opacus's, whose parameters are in the order of the metric's.
        metric: U → K_B U K_A, which is its own transpose.

    **Privacy:** that of Opacus's optimizer, because the map follows on what is already noisy.
    """

    def __init__(self, optimizer: DPOptimizer, metric: MetricMap):
        super().__init__(
            optimizer.original_optimizer,
            noise_multiplier=optimizer.noise_multiplier,
            max_grad_norm=optimizer.max_grad_norm,
            expected_batch_size=optimizer.expected_batch_size,
            loss_reduction=optimizer.loss_reduction,
            generator=optimizer.generator,
            secure_mode=optimizer.secure_mode,
        )
        self._metric = metric

    def scale_grad(self) -> None:
        """Divide the noisy sum by the size of a batch, and bring it back to the parameters."""
        super().scale_grad()
        moved = self._metric.lift(torch.cat([p.grad.flatten() for p in self.params]))
        for p, part in zip(self.params, torch.split(moved, [p.numel() for p in self.params]), strict=True):
            p.grad = part.view_as(p)


def in_metric(module: GradSampleModule, optimizer: DPOptimizer, metric: MetricMap) -> MetricOptimizer:
    """Let Opacus's hooks give the records' gradients in a metric, and its optimizer take steps there.

    Args:
        module: Opacus's, whose layers get another rule for their gradients.
        optimizer: Opacus's.
        metric: of the same layers.

    **Privacy:** a record's gradients are in the metric before Opacus clips them, so what it adds noise to is a sum in
    which a record's share has norm at most C in the metric.
    """
    blocks = blocks_of(module._module, Layout.of(module._module))
    roots = {layer: (block, k) for (layer, block), k in zip(blocks.items(), metric.roots, strict=True)}
    known = module.GRAD_SAMPLERS

    def sampler(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> GradSamples:
        if layer not in roots:
            found: GradSamples = known[type(layer)](layer, activations, backprops)
            return found
        block, (k_a, k_b) = roots[layer]
        if isinstance(layer, nn.Linear) and block.inputs and backprops.dim() == 2:
            # The gradient is b ⊗ a: one product for each record, where the matrix would need one for each of its rows.
            inputs = k_a.times(activations[0])
            if block.bias is not None:
                inputs += k_a.times(inputs.new_ones(1), block.inputs)
            return _parts(layer, block, torch.einsum("ni,nj->nij", k_b.times(backprops), inputs))
        found = known[type(layer)](layer, activations, backprops)
        matrices = [found[p].flatten(2) if p.dim() > 1 else found[p][..., None] for p in _parameters(layer, block)]
        return found | _parts(layer, block, k_b.both(k_a, torch.cat(matrices, dim=2)))

    module.GRAD_SAMPLERS = known | {type(layer): sampler for layer in roots}
    return MetricOptimizer(optimizer, metric)


def _parameters(layer: nn.Module, block: Block) -> list[nn.Parameter]:
    """Weight and bias of a layer, as far as they are in its block."""
    pairs: Any = ((layer.weight, block.weight), (layer.bias, block.bias))
    return [p for p, place in pairs if place is not None]


def _parts(layer: nn.Module, block: Block, matrices: Tensor) -> GradSamples:
    """Weight and bias of a layer with their parts of matrices (B, outputs, width)."""
    parameters = _parameters(layer, block)
    parts = torch.split(matrices, [p[0].numel() for p in parameters], dim=2)
    return {p: part.reshape(-1, *p.shape) for p, part in zip(parameters, parts, strict=True)}


@dataclass(frozen=True, eq=False)
class Units:
    """A metric that was bought, and what is known of the records in it.

    Attributes:
        metric: the map.
        damping: h₀, by which the loss curves at most.
        bound: C, at which gradients are clipped.
    """

    metric: MetricMap
    damping: float
    bound: float


def bought(task: Task, epsilon: float, books: Books) -> Units:
    """The metric and the bound that ``ours`` would have with the same budget.

    Raises:
        ValueError: hooks cannot serve the model, so that it has no metric.

    **Privacy:** charged to the books; of the budget no more is reserved.
    """
    measurement = Measurement(Sparse(seed=0), None, criterion=task.criterion, progress=False)
    rounds = LearnedRounds(DataLoader(task.private, batch_size=BATCH), measurement, epsilon, DELTA, books)
    try:
        planned = rounds.plan(task.model)
        geometry = rounds.geometry(planned.bench, planned.rule, planned.blocks)
        bench = planned.bench if geometry.subspace is None else planned.bench.within(geometry.subspace)
        if not isinstance(bench.map, MetricMap):
            raise ValueError(f"{task.name} must have layers that hooks can serve: without them there is no metric")
        return Units(bench.map, geometry.damping, rounds.bound(bench, planned.rule, math.sqrt(geometry.damping)))
    finally:
        rounds.end()


def noise_of(rule: Rule, steps_per_epoch: int, epochs: int) -> float:
    """σ of the steps: the least with which they cost (ε, δ) together with what is bought before them."""
    others = gaussian_total([event for what, event in rule.queries() if what in BOUGHT])
    return least_noise(rule.epsilon, rule.delta, others, 1 / steps_per_epoch, steps_per_epoch * epochs)


def run(name: str, settings: Settings, epsilon: float, seed: int, log: Journal) -> Facts:
    """One run at (ε, δ), from the log or made now: test score, seconds, passes, and what the ledger says was charged.

    Noise of metric and steps comes from the seed, so that all rates have the same metric. Searches for the noise are in no
    run's time.
    """
    cell = {"task": name, "method": "metric", "settings": settings, "epsilon": epsilon, "delta": DELTA, "seed": seed}
    if (found := log.get(cell)) is not None:
        return found
    task = task_of(name, seed)
    rule, plan = rule_of(task, epsilon), schedule(settings, len(task.private))
    noise = noise_of(rule, *plan)
    assert rule.noise_multiplier > 0  # found here, and remembered
    books = ExpMQuadEngine(noise_generator=np.random.default_rng([seed, 1])).books()
    begin = time.process_time()
    units = bought(task, epsilon, books)

    def changed(module: GradSampleModule, optimizer: DPOptimizer) -> DPOptimizer:
        made = in_metric(module, optimizer, units.metric)
        made.attach_step_hook(books.accountant.get_optimizer_hook_fn(sample_rate=1 / plan[0]))
        return made

    model = noisy_sgd(
        task.model,
        task.private,
        task.criterion,
        noise_multiplier=noise,
        learning_rate=settings["learning_rate"] / units.damping,
        max_grad_norm=units.bound,
        batch_size=batch_size(settings, len(task.private)),
        epochs=settings["epochs"],
        max_physical_batch_size=256,
        seed=zlib.crc32(canonical([seed, 0]).encode()),
        changed=changed,
    )
    seconds = time.process_time() - begin
    found = {
        "score": task.score(model),
        "seconds": seconds,
        "passes": settings["epochs"] + 2,  # one for the metric, and one for C
        "metric": task.metric,
        **ledger(books),
    }
    print({**cell, **found}, flush=True)
    return log.put(cell, found)


def ledger(books: Books) -> Facts:
    """What was charged and for what, as the ledger has it."""
    accountant = books.accountant
    [(noise, rate, steps)] = accountant.history
    asked = [event for event in accountant.releases if isinstance(event, Query)]
    return {
        "charged": total_epsilon(accountant.releases, accountant.history, DELTA).epsilon,
        "plan": {"steps": steps, "sample_rate": rate, "noise_multiplier": noise, "shares": shares(asked)},
    }


def grid(name: str) -> Grid:
    """The settings of a task that are searched."""
    rates = FEW_RATES if name in ("mnist", "mnist_far", "sms_lora") else RATES
    return {"learning_rate": rates, "sample_rate": (0.05,), "epochs": (10,)}


def tuned(name: str, epsilon: float, seed: int, log: Journal, *, searched: Sequence[int]) -> Facts:
    """The run with the best learning rate; the search is not charged."""
    listed = combinations((grid(name),))
    return best_of(listed, lambda settings, one: run(name, settings, epsilon, one, log), seed, searched)
