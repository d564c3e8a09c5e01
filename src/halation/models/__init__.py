"""Model families behind one protocol; the only importers of diffusers and transformers."""
