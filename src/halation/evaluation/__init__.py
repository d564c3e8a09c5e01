"""`halation evaluate`: features of images on all ranks, and the metrics computed from them."""
