"""Ranks, process groups, launcher, engines, checkpoints; knows nothing of diffusion."""
