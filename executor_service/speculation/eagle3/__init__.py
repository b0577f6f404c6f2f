"""An EAGLE-3 head: one layer that guesses on from what the layers of a model say."""
