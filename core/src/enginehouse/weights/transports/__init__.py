"""Built-in weight transports, found by their records."""
