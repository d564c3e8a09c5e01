"""One module a command; the only ones that see a whole config."""
