"""Runs the user's functions that score responses, in separate processes."""
