"""Tensors are recognised by their records, and what was changed in place is noticed."""

import math

import pytest
import torch
from torch import nn

from opacus_expm.swap.tensors import changed_since, fingerprint, same_records, tensors_of, with_versions

GIVEN = torch.tensor([[1.0, 2.0], [3.0, math.nan], [5.0, 6.0]])


@pytest.mark.parametrize(
    ("found", "same"),
    [
        (GIVEN, True),
        (GIVEN.clone(), True),
        (GIVEN.double(), True),
        (GIVEN[:, :, None], True),
        (GIVEN.flip(0), False),
        (GIVEN[:2], False),
        (GIVEN.flatten(), False),
        (GIVEN.nan_to_num(), False),
        (GIVEN + 1e-3, False),
    ],
)
def test_records_are_the_same_whatever_their_type_and_shape(found, same):
    assert same_records(found, GIVEN) is same


def test_tensors_are_found_wherever_they_are():
    first, second, third = (torch.full((2,), float(i)) for i in range(3))
    found = tensors_of({"x": first, "more": [second, (third, "text", 3, None)]})
    assert [int(t[0]) for t in found] == [0, 1, 2]
    assert tensors_of("text") == []


def test_a_change_in_place_is_noticed():
    tensor = GIVEN.clone()
    held = with_versions([tensor])
    tensor * 2
    assert not changed_since(held)
    tensor.mul_(1.0)
    assert changed_since(held)


def test_tensors_of_inference_mode_have_no_versions_and_raise_nothing():
    with torch.inference_mode():
        tensor = torch.zeros(2)
    assert not changed_since(with_versions(tensor))


CHANGES = {
    "nothing": (lambda module: None, False, False),
    "a weight": (lambda module: module.weight.mul_(1.0), True, True),
    "a buffer": (lambda module: module.running_mean.add_(1.0), True, False),
    "frozen": (lambda module: module.requires_grad_(False), True, True),
    "moved": (lambda module: module.double(), True, True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_fingerprint_tells_what_changed(name):
    change, seen, seen_without_buffers = CHANGES[name]
    module = nn.BatchNorm1d(2)
    before, without = fingerprint(module), fingerprint(module, buffers=False)
    with torch.no_grad():
        change(module)
    assert (fingerprint(module) != before) is seen
    assert (fingerprint(module, buffers=False) != without) is seen_without_buffers
