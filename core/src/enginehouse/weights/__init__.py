"""How weights reach a rollout replica: the state machine of an update, what is checked of it, and what carries it."""
