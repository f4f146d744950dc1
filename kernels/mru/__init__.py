"""The MRU mixer in one op: makes the state matrices, multiplies them up and projects the states."""
