"""Halation: train, sample, distil, batch-generate with and score diffusion transformers on every GPU that is there."""

__version__ = "0.1.0"
