"""The directory of a run, who may write into it, and its copies elsewhere."""
