"""Measurements of training itself: time, speed, and the states of mixers."""
