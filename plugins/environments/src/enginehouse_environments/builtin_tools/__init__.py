"""Tools that a config may name. Each module creates one tool, an ordinary function, from the config's arguments."""
