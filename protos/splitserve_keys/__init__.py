"""API keys: what one looks like, and the file that knows them; of the command and the scheduler."""
