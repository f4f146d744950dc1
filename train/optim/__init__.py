"""Optimizers, the rules of parameters, and learning-rate schedules."""
