"""The four questions of `enginehouse init`, each a module, and the files that it writes."""
