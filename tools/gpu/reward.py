"""The reward of the runs on a GPU. It varies whatever a model answers, so that random weights are trained too."""


def even_share(response: str) -> float:
    """Return the fraction of a response's characters whose code is even."""
    return sum(ord(character) % 2 == 0 for character in response) / max(1, len(response))
