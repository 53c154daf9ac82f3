"""Where each parameter is in the flat vector of all of them."""

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
