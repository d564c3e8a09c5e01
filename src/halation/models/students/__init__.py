"""Students of a distillation: shape, first weights, folder."""
