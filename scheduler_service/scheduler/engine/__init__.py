"""State of one executor: its rows and blocks, the steps it is sent, and what comes of them."""
