"""What every splitserve process needs around its protos: errors, server, options."""
