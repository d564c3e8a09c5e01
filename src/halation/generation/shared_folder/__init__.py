"""`--cluster files`: several commands on one folder, without a network between them."""
