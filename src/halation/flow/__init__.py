"""Maths of flows: noise, paths, samplers, guidance and averages; knows no processes and no diffusers."""
