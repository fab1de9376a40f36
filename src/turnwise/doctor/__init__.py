"""Whether a model directory, and a recipe, are right: found out by trying, and told a line each.

`template` and `conversation` need no weights, `weights` does, `recipe` and `options` need a recipe. `examine` puts them
together for `turnwise doctor`; `preflight` is the cheap part, which every run does before it begins.
"""
