"""The MRU mixer in one op: state matrices, their running products and the projection of these."""
