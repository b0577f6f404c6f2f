"""The command `splitserve`: serves, asks, shows; a thin layer over the client and the services."""
