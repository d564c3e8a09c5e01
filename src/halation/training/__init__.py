"""The training loop, its objectives, and the samples it draws on all ranks."""
