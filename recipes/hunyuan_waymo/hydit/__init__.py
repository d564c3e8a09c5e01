"""HunyuanDiT on driving scenes: the parts of this recipe."""
