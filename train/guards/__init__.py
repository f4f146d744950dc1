"""Guards watch the steps of a run for trouble: steps that are not finite, loss spikes, copies of the model that differ,
damaged shards. Each leaves something out, sends the run back to a checkpoint, or ends it."""
