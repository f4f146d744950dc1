"""Engines: how one model is spread over many devices, behind one interface."""
