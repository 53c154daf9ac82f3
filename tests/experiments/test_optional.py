"""Packages that few experiments need: loaded when they are asked for, with a message where they are not there."""

import math

import pytest

from opacus_expm.experiments import optional


def test_a_module_that_is_there_is_loaded():
    assert optional.load("math") is math


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (("no_such_module",), "no-such-module"),
        (("no_such_module.part",), "no-such-module"),
        (("NSM.Part", "nsm"), "nsm"),
    ],
)
def test_the_message_names_what_to_install(arguments, package):
    with pytest.raises(
        ImportError, match=rf"needs the package {package}: pip install {package}, or .*opacus-expm\[suite"
    ):
        optional.load(*arguments)
