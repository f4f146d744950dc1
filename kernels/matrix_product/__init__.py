"""Running products of matrices: the scan of the MRU."""
