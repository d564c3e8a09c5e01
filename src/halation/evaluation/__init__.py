"""Scores of pictures: features in, numbers out."""
