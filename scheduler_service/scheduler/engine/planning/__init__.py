"""Planning of the next step: arrival checks, admission, and the tokens that each row computes."""
