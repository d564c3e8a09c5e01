"""Run folders: paths, atomic writes, the record of a run, its lock and control requests."""
