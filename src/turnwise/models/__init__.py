"""What the trainer and the embedded engine share about a transformers model."""
