"""Leading directions of public curvature in their own units: the map, and how many of them a budget pays for."""

import pytest
import torch
from reference import CPU, dense, flat, normal, orthonormal, projected

from opacus_expm.subspaces.leading import Leading
from opacus_expm.subspaces.preconditioned import PublicCurvature

VALUES = torch.tensor([8.0, 4.0, 1.0, 0.5, 0.25, 0.0], dtype=torch.float64)
CURVATURE = PublicCurvature(VALUES, orthonormal(20, len(VALUES)))


def dimensions(found: Leading) -> float:
    """Σ h/(h + h₀)."""
    return float((VALUES / (VALUES + found.damping)).sum())


def test_the_map_has_every_direction_in_its_own_unit() -> None:
    found = Leading(CURVATURE, 0.5).build(flat(20), None, CPU, torch.float64)
    expected = CURVATURE.vectors @ torch.diag((VALUES + 0.5) ** -0.5)
    assert (found.size, found.dim) == (20, len(VALUES))
    torch.testing.assert_close(dense(found), expected, rtol=0, atol=1e-12)
    v = normal(3, 20)
    torch.testing.assert_close(projected(found, v, [7]), v @ expected, rtol=0, atol=1e-12)
    # The curvature in these coordinates is h/(h + h₀).
    h = CURVATURE.vectors @ torch.diag(VALUES) @ CURVATURE.vectors.T
    torch.testing.assert_close(expected.T @ h @ expected, torch.diag(VALUES / (VALUES + 0.5)), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="proj_dim must be None with leading directions, got 3"):
        Leading(CURVATURE, 0.5).build(flat(20), 3, CPU, torch.float64)


@pytest.mark.parametrize("wanted", [0.1, 1.0, 3.0])
def test_as_many_dimensions_take_part_as_are_paid_for(wanted: float) -> None:
    assert dimensions(Leading.of(CURVATURE, wanted)) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("wanted", [5.0, 1e6])
def test_no_direction_is_stretched_beyond_a_known_measure(wanted: float) -> None:
    found = Leading.of(CURVATURE, wanted)
    assert found.damping == 8.0 / 160
    assert dimensions(found) < wanted


def test_public_records_without_curvature_are_refused() -> None:
    flat = PublicCurvature(torch.zeros(2, dtype=torch.float64), orthonormal(20, 2))
    with pytest.raises(ValueError, match="public_loader's records have no curvature: leave public_loader out"):
        Leading.of(flat, 3.0)
