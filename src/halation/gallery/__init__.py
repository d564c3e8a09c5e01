"""`halation gallery`: show runs in a browser, served or exported as one file."""
