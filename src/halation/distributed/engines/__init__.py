"""How training is spread over ranks: single, DDP, FSDP2, DeepSpeed."""
