"""Datasets: reading, cropping, shuffling, caching and prefetching."""
