"""What every process needs around its protos: errors, the server, the contract's version."""
