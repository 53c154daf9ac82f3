"""The full space."""

import pytest
import torch
from reference import CPU, dense, flat

from opacus_expm.subspaces import Sparse, Stiefel
from opacus_expm.subspaces.full import FullSpace


@pytest.mark.parametrize("recipe", [Sparse(), Stiefel(), Sparse(3)], ids=str)
def test_the_full_space_is_the_identity_and_needs_no_seed(recipe):
    projection = recipe.build(flat(6), None, CPU, torch.float64)
    assert projection == FullSpace(6)
    assert (projection.kind, projection.seed, projection.size, projection.dim) == ("full", None, 6, 6)
    assert torch.equal(dense(projection), torch.eye(6, dtype=torch.float64))
