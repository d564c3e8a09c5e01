"""Metrics: features or moments in, numbers with their provenance out."""
