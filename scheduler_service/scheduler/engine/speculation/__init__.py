"""What may follow the tokens of a row, how often such a guess was right, and how many pay."""
