"""Commands beside the main jobs: `halation ctl`, `demo` and `doctor`."""
