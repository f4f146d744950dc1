"""How fast things are, side by side with the best peer."""
