"""Whether a model, or what is to replace a part of it, computes what plain torch computes."""
