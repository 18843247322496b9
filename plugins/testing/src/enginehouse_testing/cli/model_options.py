"""Options of commands that can use a user's model instead of the tiny models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])

OPTIONS = (
    click.option(
        "--model",
        metavar="PATH|NAME",
        help="Directory of a model, GGUF file, name in the cache (smollm2-135m-instruct), or name on the hub.",
    ),
    click.option(
        "--dtype", type=click.Choice(["float32", "bfloat16"]), help="Number format in which the engines compute."
    ),
    click.option(
        "--layers",
        type=click.IntRange(min=1),
        help="Layers of --model to keep; unset: all; on a CPU without bfloat16 instructions, 4 in bfloat16.",
    ),
)


def model_options(command: F) -> F:
    """Give a command the options `--model`, `--dtype` and `--layers`."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
