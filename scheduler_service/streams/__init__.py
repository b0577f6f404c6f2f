"""Client streams: tokens and ends of requests on their way back to clients."""
