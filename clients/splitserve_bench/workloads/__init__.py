"""What is asked, and when: drawn from a seed, or as it was recorded."""
