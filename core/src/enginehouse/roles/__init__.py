"""Roles of a training loop: their plans, workers, placement, and turns on shared devices."""
