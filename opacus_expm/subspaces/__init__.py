"""Linear maps between the parameters and the subspace in which the mechanism works."""
