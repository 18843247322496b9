"""The stages of a step, one per file. The plan chooses and orders them."""
