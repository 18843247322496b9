"""`enginehouse new-plugin`: makes a whole package for a plugin's author to fill in, from templates."""
