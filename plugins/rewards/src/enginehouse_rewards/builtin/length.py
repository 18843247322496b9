from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from enginehouse.errors import ConfigError
from enginehouse.plugin import checked_reward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


def check(arguments: Mapping[str, Any], columns: Sequence[str] | None) -> None:
    """Raise `ConfigError` unless the arguments define exactly one penalty."""
    target, most, buffer = (arguments.get(name) for name in ("target", "max_tokens", "buffer_tokens"))
    if (target is None) == (most is None) or (most is None) != (buffer is None):
        raise ConfigError("the reward 'length' needs either target, or max_tokens and buffer_tokens")
    if most is not None and buffer is not None and buffer > most:
        raise ConfigError(f"buffer_tokens must be at most max_tokens, {most}, not {buffer}")


@checked_reward(check)
def length(
    response_tokens: int,
    *,
    target: Annotated[int, Field(gt=0)] | None = None,
    max_tokens: Annotated[int, Field(gt=0)] | None = None,
    buffer_tokens: Annotated[int, Field(gt=0)] | None = None,
) -> float:
    """Return a penalty for a wrong length: 0.0 for a right length, down to -1.0.

    With `max_tokens` and `buffer_tokens` it is the soft overlong punishment of DAPO (Yu et al. 2025, equation 13): 0 up
    to `max_tokens - buffer_tokens`, then falling linearly to -1 at `max_tokens`.

    Args:
        target: number of tokens that a response should have. The penalty is the fraction by which it has too many or
            too few.
        max_tokens: length at which the penalty reaches -1.
        buffer_tokens: number of tokens before `max_tokens` at which the penalty begins.
    """
    if target is not None:
        return -min(abs(response_tokens - target) / target, 1.0)
    if max_tokens is None or buffer_tokens is None:
        raise ValueError("length needs either target, or max_tokens and buffer_tokens")
    return -min(max(response_tokens - (max_tokens - buffer_tokens), 0) / buffer_tokens, 1.0)
