"""Processes that generate images: local ones and Ray actors."""
