"""What the result of a step brings, and what a failure takes."""
