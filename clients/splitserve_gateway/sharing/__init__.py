"""What is bounded, and by which rules those who want it share it."""
