"""Checks of a model directory and of a recipe, with a line of output for each check.

`template`, `messages`, `conversation` and `credit` need no weights. `weights` needs the model's weights. `recipe` and `options`
need a recipe. `examine` runs all checks for `turnwise doctor`. `preflight` runs the cheap checks at the start of each run.
"""
