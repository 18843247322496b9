"""Roles of a loop: their plans, workers, placement, and turns on shared devices."""
