"""Model families behind common protocols: finding, loading and sampling models."""
