"""`--cluster files`: several commands on one shared folder, without a network connection."""
