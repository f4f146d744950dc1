"""Makes a sequence of a picture: patches, positions, class tokens, and the orders in which patches are read."""
