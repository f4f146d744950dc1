"""Runs that begin with the weights of another model: what these are read from, and what of them is taken."""
