"""What a run would be, found without data and without memory."""
