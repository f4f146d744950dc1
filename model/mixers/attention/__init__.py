"""Softmax attention, and attention whose mask is a structured matrix."""
