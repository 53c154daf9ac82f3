"""Hypothesis without randomness of its own: the same examples in every run."""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("ci")
