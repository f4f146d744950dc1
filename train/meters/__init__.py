"""What is counted while training: time, speed, and what mixers say of themselves."""
