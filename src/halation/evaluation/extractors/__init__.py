"""Networks that turn images into features: Inception, DINOv2, CLIP, street scenes."""
