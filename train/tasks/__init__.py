"""What a batch and a loss are."""
