"""From a model and its loader to clipped sums: everything here holds private data."""
