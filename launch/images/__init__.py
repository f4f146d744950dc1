"""Verbs on pictures: the classes that a model gives them."""
