"""enginehouse: reinforcement-learning post-training of language models with any engine, on Ray.

Importing this package imports nothing else. Each part is imported where it is used, so that the command line answers
at once and a worker process loads only what it runs.
"""

__version__ = "0.1.0"
