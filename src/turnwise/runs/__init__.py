"""What training and fine-tuning have in common: the state of a run, resuming, metrics, evaluation."""
