"""Guards: they stop a run, send it back to a checkpoint or skip data when something goes wrong."""
