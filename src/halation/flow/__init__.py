"""Diffusion and flow-matching maths on tensors."""
