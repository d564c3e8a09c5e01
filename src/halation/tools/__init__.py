"""Auxiliary commands: `halation ctl`, `demo` and `doctor`."""
