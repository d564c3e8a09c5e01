"""Parts of the tests that know the program only by its command line and its files."""
