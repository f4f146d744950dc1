"""Measures candidates against each other, whatever they compute: settings, rounds, floors, tables and pictures."""
