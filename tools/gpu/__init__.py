"""`make test-gpu`: everything that needs a GPU. `steps` says what each step is, and `running` runs the steps."""
