"""Gated RMSNorm."""
