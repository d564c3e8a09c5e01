"""Halation's own diffusion transformer."""
