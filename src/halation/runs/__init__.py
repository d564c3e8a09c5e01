"""Run folders: paths, atomic writes, the record of a run, who holds it, requests to it."""
