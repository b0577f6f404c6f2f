"""From what a caller asks to text: sampling parameters, prompts, and the choices as they come."""
