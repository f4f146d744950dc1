"""Errors that are neither the user's mistake (ValueError) nor ours (AssertionError)."""


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a NaN or infinite loss or gradient."""
