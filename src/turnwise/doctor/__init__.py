"""Checks of a model directory and of a recipe, with a line of output for each check.

`template`, `conversation` and `credit` need no weights. `weights` needs the model's weights. `recipe` and `options` need a
recipe. `memory` predicts the memory of a run. `examine` runs all checks for `turnwise doctor`. `template.preflight` runs the
cheap checks at the start of each run.
"""
