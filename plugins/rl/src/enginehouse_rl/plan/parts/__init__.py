"""The parts of a plan. Each part resolves and checks one section of the config, and describes its effect on the run."""
