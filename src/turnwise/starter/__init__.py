"""The demo and the starter project that are part of the installed package: a tiny model, rows, recipes.

`demo/` has the files of `turnwise demo`; in a clone they are links to `demo/` and `recipes/calculator.yaml` of the repository.
`template/` has the files that `turnwise init` writes. This package knows files and recipes, and starts no run.
"""

from turnwise.starter.files import DEMO_OUTPUT, demo_overrides, demo_recipe, write_project

__all__ = ["DEMO_OUTPUT", "demo_overrides", "demo_recipe", "write_project"]
