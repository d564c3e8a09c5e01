"""`halation evaluate`: features of images on all ranks, and metrics computed from them."""
