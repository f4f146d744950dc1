"""What half an hour on a GPU is spent on: correctness, the fastest tiles, the time of each kernel, and the peers."""
