"""Mixers against each other at equal parameters, data and steps: `matmix compare RECIPE`."""
