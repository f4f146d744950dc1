"""Tools to study models and machines, not to train: comparisons, pictures, plans, benchmarks, studies."""
