"""The stages of a step, a file each. The plan chooses and orders them."""
