"""Measurements of enginehouse, each beside its peers in the same run. `python -m benchmarks NAME` runs one."""
