"""Other ways to compute what our operations compute: published packages, other algorithms, torch.compile."""
