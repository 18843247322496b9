"""Rollout replicas behind one interface. Requests go to a replica with capacity, and to another if their replica is
lost."""
