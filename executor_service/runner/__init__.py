"""One step on a device, and how much room it needs."""
