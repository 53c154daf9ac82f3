"""Where each parameter is in the flat vector of all of them."""

import math

import pytest
import torch
from torch import nn

from opacus_expm.subspaces.layout import Layout

MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def test_parameters_come_one_after_the_other():
    layout = Layout.of(MODEL)
    assert layout.size == 21
    assert [(name, tuple(shape), place.start, place.stop) for name, shape, place in layout.slices()] == [
        ("0.weight", (4, 3), 0, 12),
        ("0.bias", (4,), 12, 16),
        ("2.weight", (1, 4), 16, 20),
        ("2.bias", (1,), 20, 21),
    ]


def test_frozen_parameters_have_no_place_and_shared_ones_have_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    layout = Layout.of(model)
    assert (layout.names, layout.offsets, layout.size) == (("0.weight", "1.bias"), (0, 16), 20)


def test_numbers_by_name_are_spread_over_the_coordinates():
    found = Layout.of(MODEL).spread("scales", {"0.bias": 4.0, "2.bias": 7.0})
    expected = torch.ones(21, dtype=torch.float64)
    expected[12:16], expected[20] = 4.0, 7.0
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"0.weigth": 2.0}, r"scales names '0.weigth', .* it has 0.weight, 0.bias, 2.weight"),
        ({"0.bias": 0.0}, r"scales\['0.bias'\] must be greater than 0, got 0.0"),
        ({"0.bias": math.nan}, r"scales\['0.bias'\] must be a number greater than 0, got nan"),
        ({"0.bias": "2"}, r"scales\['0.bias'\] must be a number greater than 0, got '2' of type str"),
        ([2.0], "scales must be a mapping from names of parameters to numbers, got list"),
    ],
)
def test_what_cannot_be_spread_is_refused(scales, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Layout.of(MODEL).spread("scales", scales)
