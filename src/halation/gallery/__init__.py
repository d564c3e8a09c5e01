"""The page that shows runs while they work."""
