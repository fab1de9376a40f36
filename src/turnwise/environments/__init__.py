"""What comes after the model has spoken."""
