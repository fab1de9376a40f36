"""Rollout workers on a Ray cluster: conversations run in Ray actors, and the trainer gets their trajectories."""
