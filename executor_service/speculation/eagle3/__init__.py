"""EAGLE-3 head: a draft of one layer that reads hidden states of the target model's layers."""
