"""Samples drawn by all ranks of a job, and `halation sample`."""
