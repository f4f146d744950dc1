"""What sends a run back, or leaves something out, so that it can go on."""
