"""Estimates of a run's size, memory and cost, made without data and without allocating the model."""
