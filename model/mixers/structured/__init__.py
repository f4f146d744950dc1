"""Mixers with a matrix of one structured class each, all in the same block (arXiv 2407.09941, section 3)."""
