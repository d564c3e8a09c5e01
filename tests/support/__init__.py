"""What tests share: pools of ranks, tiny models, readers of run folders, commands as processes."""
