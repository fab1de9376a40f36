"""From a checked recipe to live objects: environments, rewards, engine, optimizer."""
