"""Recipes by their names, with their seeds, and from a file."""

import pytest
import torch
from reference import CPU, dense

from opacus_expm.subspaces import Sparse, Stiefel, Structured, named, read

RECIPES = {
    "sparse": Sparse(4),
    "structured": Structured(4),
    "stiefel": Stiefel(4),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sparse", Sparse), ("structured", Structured), ("stiefel", Stiefel)],
)
def test_a_name_is_a_recipe_with_its_default_settings(name, kind):
    found = named(name)
    assert type(found) is kind
    assert (found.kind, found.seed) == (name, None)
    assert named(found) is found


@pytest.mark.parametrize("kind", ["dense", "Stiefel", "preconditioned", ""])
def test_unknown_names_are_refused(kind):
    known = "'sparse', 'structured', 'stiefel'"
    with pytest.raises(ValueError, match=f"projection must be one of {known}, got"):
        named(kind)


@pytest.mark.parametrize("kind", [None, 3, Sparse])
def test_what_is_no_recipe_is_refused(kind):
    with pytest.raises(TypeError, match=r"projection must be one of .* or a subspace such as Sparse\(seed=0\), got"):
        named(kind)


@pytest.mark.parametrize("recipe", [Sparse, Structured, Stiefel])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": -1}, "seed must be a non-negative integer or None, got -1"),
        ({"seed": 1.0}, "seed must be a non-negative integer or None, got 1.0"),
    ],
)
def test_settings_that_make_no_recipe_are_refused(recipe, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        recipe(**settings)


@pytest.mark.parametrize("name", RECIPES)
def test_another_seed_is_all_that_changes(name):
    recipe = RECIPES[name]
    other = recipe.seeded(9)
    assert (recipe.seed, other.seed) == (4, 9)
    assert other.to_dict() | {"seed": 4} == recipe.to_dict()


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_written_gives_the_same_map(name):
    recipe = RECIPES[name]
    again = read(recipe.to_dict())
    assert type(again) is type(recipe)
    for dim in (2, 9, None):
        maps = [dense(r.build([torch.Size([4, 3]), torch.Size([8])], dim, CPU, torch.float64)) for r in (recipe, again)]
        assert torch.equal(*maps)
    assert again.to_dict() == recipe.to_dict()


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        {"kind": "dense"},
        {"kind": "sparse", "colour": 1},
        {"kind": ["sparse"]},
    ],
)
def test_what_is_no_recipe_is_not_read(content):
    with pytest.raises(ValueError, match="this is no projection"):
        read(content)
