"""Model families behind one protocol, and how a model is found, loaded and sampled from."""
