"""Ranks, process groups, launching, engines and checkpoints; nothing here knows of diffusion."""
