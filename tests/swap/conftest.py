"""What an undisturbed loop releases."""

import pytest
from loops import flat, make_loop


@pytest.fixture(scope="session")
def clean():
    """Weights after one undisturbed epoch of ``make_loop()``."""
    loop = make_loop()
    loop.epoch()
    return flat(loop.module)
