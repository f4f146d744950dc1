"""One file for each architecture: what it reads, how it is embedded, and what it predicts."""
