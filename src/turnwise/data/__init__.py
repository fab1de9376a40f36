"""Where a conversation starts."""
