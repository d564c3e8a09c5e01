"""`halation generate`: an image for every prompt of a list, on every GPU, resumable."""
