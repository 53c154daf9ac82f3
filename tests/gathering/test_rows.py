"""Which gatherer finds the rows: hooks where they can serve, said where they cannot."""

import warnings

import pytest
import torch
from reference import CASE, random_map

from opacus_expm import GradSampling
from opacus_expm.gathering.functional import FunctionalRows
from opacus_expm.gathering.hooks import ProjectedGradSampleModule
from opacus_expm.gathering.model import working_copy
from opacus_expm.subspaces.layout import Layout


def source(case, mode):
    module, inputs = working_copy(CASE[case].model()), CASE[case].batch(1)
    layout = Layout.of(module)
    return GradSampling(mode).source(module, layout, random_map("sparse", layout.size, 3), inputs)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [(None, ProjectedGradSampleModule), ("hooks", ProjectedGradSampleModule), ("functorch", FunctionalRows)],
)
def test_the_mode_decides_and_hooks_are_the_default(mode, kind):
    assert isinstance(source("mlp", mode), kind)


def test_where_hooks_cannot_serve_the_fallback_is_said_and_insisting_is_refused():
    with pytest.warns(UserWarning, match="using grad_sample_mode='functorch', because"):
        assert isinstance(source("transformer", None), FunctionalRows)
    with pytest.raises(ValueError, match=r"grad_sample_mode='hooks' cannot serve this model: .*; use 'functorch'"):
        source("transformer", "hooks")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(source("transformer", "functorch"), FunctionalRows)


def test_a_name_or_the_object_itself():
    own = GradSampling("hooks", probes=3)
    assert GradSampling.named(own) is own
    assert GradSampling.named("functorch") == GradSampling("functorch")
    assert GradSampling.named(None) == GradSampling()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "ghost"}, "grad_sample_mode must be one of 'hooks', 'functorch', got 'ghost'"),
        ({"mode": 3}, "grad_sample_mode must be one of 'hooks', 'functorch', got 3"),
        ({"probes": 0}, "probes must be a positive integer, got 0"),
        ({"probes": 2.0}, "probes must be a positive integer, got 2.0 of type float"),
    ],
)
def test_what_cannot_be_done_is_refused(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        GradSampling(**settings)


def test_a_model_that_draws_at_random_is_run_record_by_record():
    torch.manual_seed(0)

    class Noisy(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.rand(x.shape))

    module = working_copy(Noisy(4, 2))
    layout = Layout.of(module)
    projection = random_map("sparse", layout.size, 3, dtype=torch.float32)
    with pytest.warns(UserWarning, match="every record needs numbers of its own"):
        found = GradSampling().source(module, layout, projection, torch.zeros(1, 4))
    assert isinstance(found, FunctionalRows)
