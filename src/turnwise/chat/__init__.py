"""Messages to tokens and back, from the model's own chat template. Knows no engine and no environment."""
