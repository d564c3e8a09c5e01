"""Pipelines of diffusers as models to generate with."""
