"""Checkpoints: written asynchronously, committed last, read on any number of ranks."""
