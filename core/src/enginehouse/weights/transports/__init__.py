"""Built-in weight transports, which their records name."""
