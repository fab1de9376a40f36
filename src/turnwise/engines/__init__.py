"""Token ids in, token ids and log-probabilities out.

Nothing asks for an engine's name: the properties of an `EngineSection` say what it can do, and `ENGINES` (`assembly/engines.py`)
leads to its maker. The embedded engine samples with the trainer's parameters in the event loop's thread (another would wait for
the interpreter lock at each small operation); publishing clears its KV cache. New weights are checked before a completion with
them counts, and a restored server gets them before it serves.

Deterministic runs: `Batched` waits until all active conversations have sent a request, and sorts them. A conversation's seed is
computed from `seed` and the trajectory's id; no global generator is used, so a checkpoint has no generator state.
"""
