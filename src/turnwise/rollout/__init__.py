"""One conversation, then a group of them."""
