"""Students of a distillation: architecture, initial weights, pipeline folder."""
