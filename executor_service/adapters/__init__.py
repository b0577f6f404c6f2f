"""LoRA adapters: reading, checking and holding them."""
