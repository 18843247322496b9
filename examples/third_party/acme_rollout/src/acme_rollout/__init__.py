"""The package acme-rollout, a plugin of enginehouse."""
