"""`halation distill`: train a student on the targets of a teacher."""
