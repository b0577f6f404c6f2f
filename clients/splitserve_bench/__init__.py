"""`splitserve bench`: load, drawn from seeds or recorded, and what servers make of it."""
