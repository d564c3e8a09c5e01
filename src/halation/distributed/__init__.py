"""Ranks, process groups, launcher, engines, checkpoints; independent of diffusion."""
