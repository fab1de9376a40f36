"""The recipe: its schema, how it is read, and which combinations of options are refused."""
