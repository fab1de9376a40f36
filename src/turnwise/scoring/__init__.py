"""What a conversation was worth, and which turn is to thank."""
