"""Load benchmark `splitserve bench`: puts load on servers, synthetic or recorded, and measures."""
