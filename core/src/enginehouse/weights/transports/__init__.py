"""Built-in weight transports. Each is found by its record, not imported from here."""
