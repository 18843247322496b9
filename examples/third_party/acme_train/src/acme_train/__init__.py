"""The package acme-train, a plugin of enginehouse."""
