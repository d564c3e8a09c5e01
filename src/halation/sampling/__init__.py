"""Sampling on all ranks of a job, and `halation sample`."""
