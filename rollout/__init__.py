"""Parallel rollout: group generation on the modules and weights that are trained."""
