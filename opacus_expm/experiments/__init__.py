"""Experiments on known data, side by side with other methods. Nothing in the package needs them but the command line."""
