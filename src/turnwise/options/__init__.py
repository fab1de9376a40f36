"""The options of a recipe: a section is the class that the code takes, so an option and its default stand in one place."""
