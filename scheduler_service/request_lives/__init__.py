"""What happened to each request, and what it waited for: kept for a while, told to listeners."""
