"""The options of commands that take another model than the tiny ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])

OPTIONS = (
    click.option(
        "--model",
        metavar="PATH|NAME",
        help="A directory of a Hugging Face model, a GGUF file, or a name in the cache (smollm2-135m-instruct) or on "
        "the hub.",
    ),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="What engines compute in."),
    click.option(
        "--layers",
        type=click.IntRange(min=1),
        help="Only the first layers of --model; unset: all, or 4 in bfloat16 on a CPU without instructions for it.",
    ),
)


def model_options(command: F) -> F:
    """Give a command the options `--model`, `--dtype` and `--layers`."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
