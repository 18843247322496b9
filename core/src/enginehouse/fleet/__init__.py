"""Rollout replicas as one: requests go to a replica with free capacity, and those of a lost replica go to another."""
