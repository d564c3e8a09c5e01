"""`halation gallery`: runs in a browser, served or exported as one file."""
