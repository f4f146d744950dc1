"""The scans in Triton."""
