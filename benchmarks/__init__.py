"""Measurements of enginehouse beside its peers in the same run. `python -m benchmarks NAME` runs one of them."""
