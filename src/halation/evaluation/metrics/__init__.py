"""Metrics: computed from features or moments, returned with their provenance."""
