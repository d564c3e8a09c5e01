"""Models from diffusers pipelines, for training: one module per family."""
