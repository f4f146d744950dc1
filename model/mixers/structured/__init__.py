"""Mixers whose matrix is of one structured class, one block for all of them (Hydra, section 3)."""
