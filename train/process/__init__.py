"""One process of a run: how it starts, connects to the others, stays alive, stops and ends."""
