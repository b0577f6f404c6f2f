"""From the files of a checkpoint to a model that is known to be right, or a refusal by name."""
