"""What is measured of a model between steps."""
