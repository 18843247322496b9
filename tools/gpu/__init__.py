"""All that needs a GPU, on one: `make test-gpu`. What each step is stands in `steps`, how it is run in `running`."""
