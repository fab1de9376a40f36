"""What answers the model: environments, tools, users."""
