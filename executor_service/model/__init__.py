"""A model that attends through our KV pools, and the batch that it is given."""
