"""How code written by users is found, called, limited in time and run in threads."""
