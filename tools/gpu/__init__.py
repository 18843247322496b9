"""`make test-gpu`: everything that needs a GPU. `steps` defines the steps, and `running` runs them."""
