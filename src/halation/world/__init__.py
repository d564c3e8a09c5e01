"""Processes: ranks, engines, checkpoints and launching; knows nothing of diffusion."""
