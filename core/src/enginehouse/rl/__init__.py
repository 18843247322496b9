"""Where the trainer was before it was a distribution: its names of the contract still work here, and warn."""
