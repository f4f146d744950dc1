"""What a person starts in order to learn something, not to train."""
