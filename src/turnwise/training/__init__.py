"""From scored trajectories to changed weights.

Batches are prefix trees (`batch.py`, `tree.py`, `recurrent_tree.py`; on GPUs `flash_tree.py`), shared up to the first token with
other experts (`models/experts.py`). If a check at the start finds a difference, and with images, each sequence is a padded row.
Trajectories with advantage 0 count in the average, and skip the forward pass if no term gives them a gradient. References and
teachers are asked before the update. Weights change in the event loop's thread, gradients are computed in another.
"""
