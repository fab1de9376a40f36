"""Tools: their schema, their arguments, their results, and the environment that runs them."""
