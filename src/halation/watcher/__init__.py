"""`halation watch`: generate from each new checkpoint, score it, keep the best."""
