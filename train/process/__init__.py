"""A process of a run: how it begins, meets the others, stays alive, stops and ends."""
