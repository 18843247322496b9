"""Rollout replicas behind one interface. Requests go to a replica with capacity, and to another if it is lost."""
