"""`halation train`: the loop, its parts, and what happens at a checkpoint."""
