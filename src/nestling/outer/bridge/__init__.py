"""Our episodes under somebody else's training loop."""
