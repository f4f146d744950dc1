"""`matmix plan`: memory, traffic, time and risk of a run on a cluster, before it is submitted."""
