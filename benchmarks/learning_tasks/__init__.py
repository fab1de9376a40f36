"""The tasks of `benchmarks/learning.py`: an environment and a recipe for each, and the model that all runs start from."""
