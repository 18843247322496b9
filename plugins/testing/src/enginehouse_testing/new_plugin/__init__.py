"""`enginehouse new-plugin`: writes a whole package, which a plugin's author completes, from templates."""
