"""Models from diffusers pipelines, for generation."""
