"""Duels: ours and a peer in one run, a ratio out. `python -m benchmarks` runs those this machine can."""
