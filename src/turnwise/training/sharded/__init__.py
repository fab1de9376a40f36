"""Training on several devices: one process for each, with torch's FSDP2. Imported only if the recipe has a cluster.

Rank 0 runs the whole command; its `ShardedLearner` and `ShardedCritic` send commands to each rank's `ModelShard` and
`CriticShard`. FSDP2 gathers weights in hooks of modules, so each pass runs inside the root module. Ranks that compute a
micro-batch together share its targets out (`together.py`); those that divide experts send each other tokens
(`expert_parallel.py`). Checkpoints convert from and to the state of one process; other ranks read the parts (`parts.py`), and
`consolidation.py` makes a model of them. On Ray, an actor holds each rank's resources, and rank 0 starts the rollout workers.
"""
