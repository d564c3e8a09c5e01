"""`halation train`: the training loop, its components, and the tasks at a checkpoint."""
