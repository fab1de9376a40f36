"""The rollout server, which runs conversations near an engine, and the client with which a trainer uses it (docs/server.md)."""
