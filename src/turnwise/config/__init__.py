"""Recipes: how they are read, and which combinations of options are refused."""
