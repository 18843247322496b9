"""Functions of the user that judge what a model wrote, in processes of their own."""
