"""Benchmarks that compare Halation with a peer in one run and report a ratio.

`python -m benchmarks` runs those that this machine supports.
"""
