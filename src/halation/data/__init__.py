"""Data sets: read, cropped, shuffled, cached and prefetched."""
