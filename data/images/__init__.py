"""Pictures: how they are decoded, augmented and mixed; `prepare/` makes datasets of them."""
