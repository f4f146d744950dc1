"""`matmix ladder`: the entries of a comparison at several sizes, and the law that their losses follow."""
