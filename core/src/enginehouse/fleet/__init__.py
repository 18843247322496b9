"""Rollout replicas as one: requests go to the replica that has room, and what a lost one had goes to another."""
