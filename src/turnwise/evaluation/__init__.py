"""Evaluation of models: statistics of rewards, and the results of an evaluation. Reads finished trajectories."""
