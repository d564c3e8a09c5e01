"""Engines that distribute training over ranks: single, DDP, FSDP2, DeepSpeed."""
