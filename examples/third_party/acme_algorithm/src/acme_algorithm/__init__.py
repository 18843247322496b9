"""The package acme-algorithm, a plugin of enginehouse."""
