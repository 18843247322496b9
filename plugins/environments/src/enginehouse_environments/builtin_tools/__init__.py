"""Tools that a config may name. Each module makes one, an ordinary function, of the config's arguments."""
