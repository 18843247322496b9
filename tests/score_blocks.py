"""Scoring in blocks of a few logits, on ranks too. In a module of its own because rank processes import it by name."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from enginehouse_torch.modeling import scores

ELEMENTS = 100
"""Of the tests' vocabularies the logits of few tokens; of a micro-batch of theirs there are several blocks."""


def in_blocks(rank: int, world_size: int, scenario: Callable[..., Any], *arguments: Any) -> Any:
    """Run a scenario of `rank_processes`."""
    with mock.patch.object(scores, "BLOCK", ELEMENTS):
        return scenario(rank, world_size, *arguments)
