"""Verbs on pictures: preparing them, and the classes that a model gives them."""
