"""From scored trajectories to changed weights."""
