"""What clients asked for, on its way back to them."""
