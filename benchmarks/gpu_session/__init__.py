"""`gpu-session`: what half an hour on a GPU is spent on, part by part, with records that can be gone on with."""
