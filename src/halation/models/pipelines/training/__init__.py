"""Pipelines of diffusers as models to train: one module a family."""
