"""What of requests and steps is shown in traces."""
