"""The mathematics of the mechanism: numpy and scipy only, no torch, no files."""
