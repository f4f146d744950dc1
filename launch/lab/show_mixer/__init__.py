"""`matmix show-mixer`: the matrices that mix the tokens of a text."""
