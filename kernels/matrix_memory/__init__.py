"""A memory with addresses: matrices that tokens turn, add to and read."""
