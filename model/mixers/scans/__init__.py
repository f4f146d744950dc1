"""Mixers that carry a state along the sequence: state-space models and linear attention."""
