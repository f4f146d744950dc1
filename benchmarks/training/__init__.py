"""What training costs: steps of whole models, memory, saving, and the trainer itself."""
