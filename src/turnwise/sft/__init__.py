"""Fine-tuning on conversations that already exist."""
