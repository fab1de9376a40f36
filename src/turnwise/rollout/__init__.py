"""One conversation, a group of them, many."""
