"""Labelled examples to fine-tune and evaluate models on: their files, their labels, and the tokens made of them."""
