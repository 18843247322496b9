"""Tools that a config may name: each module makes one, a function as anybody's, of the arguments of a config."""
