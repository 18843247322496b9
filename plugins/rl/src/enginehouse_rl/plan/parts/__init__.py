"""The parts of a plan: each settles a section of the config, checks it, and says what it will do."""
