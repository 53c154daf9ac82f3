"""Hypothesis without randomness of its own: the same examples in every run; a data cache, and Opacus's
engines, for tests that need them.

With HYPOTHESIS_PROFILE=fuzz it looks for new examples instead, many of them, and keeps those that failed.
"""

import os
import urllib.request

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from opacus import PrivacyEngine

from opacus_expm import baselines
from opacus_expm.noise import Noise

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.register_profile(
    "fuzz", derandomize=False, deadline=None, max_examples=2000, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own for each test; no data directory, and no way out."""

    def refuse(request, timeout):
        raise OSError("no network in tests")

    monkeypatch.delenv("OPACUS_EXPM_DATA", raising=False)
    monkeypatch.setenv("OPACUS_EXPM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    return tmp_path / "cache"


@pytest.fixture
def engines(monkeypatch):
    """The Opacus engines that were made."""
    made = []

    def make(**options):
        made.append(PrivacyEngine(**options))
        return made[-1]

    monkeypatch.setattr(baselines, "PrivacyEngine", make)
    return made


@pytest.fixture
def seeded_noise(monkeypatch):
    """The same noise for every draw as if it came from the operating system: a budget accepts no generator."""
    ordinary = Noise.ordinary

    def seeded(self):
        return np.random.default_rng(5) if self.generator is None else ordinary(self)

    monkeypatch.setattr(Noise, "ordinary", seeded)
