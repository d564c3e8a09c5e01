"""One frozen dataclass a job, with a sentence and a default for every setting."""
