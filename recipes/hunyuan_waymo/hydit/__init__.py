"""Modules of the recipe: HunyuanDiT on driving scenes."""
