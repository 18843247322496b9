"""A tool that runs the policy's Python program in the sandbox, without network and files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from enginehouse.errors import ConfigError
from enginehouse_rewards import sandbox
from enginehouse_rewards.sandbox import Isolation, Sandbox, SandboxError

_running = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
"""Limits the number of concurrent programs, because more would only slow each other down."""

_RUN = """\
import ast, sys, traceback
sys.stderr = sys.stdout
try:
    program = ast.parse({source!r}, "program")
    last = program.body.pop() if program.body and isinstance(program.body[-1], ast.Expr) else None
    names = {{"__name__": "__main__"}}
    exec(compile(program, "program", "exec"), names)
    if last is not None:
        exec(compile(ast.Interactive([last]), "program", "single"), names)
except Exception as error:
    said = traceback.TracebackException.from_exception(error)
    said.stack = traceback.StackSummary.from_list([one for one in said.stack if one.filename == "program"])
    print("".join(said.format()), end="")
"""


def make_python(
    seconds: Annotated[float, Field(gt=0)] = 5.0,
    memory_mb: Annotated[int, Field(ge=64)] = 1024,
    isolation: Isolation = "required",
) -> Callable[[str], str]:
    """Return the tool `python`.

    Args:
        seconds: time limit for a program.
        memory_mb: maximum address space of a program, in MiB.
        isolation: `required`: nothing is run if the machine cannot isolate programs; `best`: as isolated as the machine
            allows.

    Raises:
        ConfigError: this machine cannot isolate a program.
    """
    if isolation == "required":
        try:
            sandbox.check_isolation()
        except SandboxError as error:
            raise ConfigError(f"tools: python: {error}") from error

    def python(program: str) -> str:
        """Run a Python program, with the standard library but without network and files, and return what it prints.

        Args:
            program: The program. Each run begins anew; the value of a last line that is an expression is printed.
        """
        with _running, Sandbox(seconds, memory_mb, isolation) as box:
            end = box.run(_RUN.format(source=program))
        if end.well:
            return end.output or "(nothing was printed)"
        return f"{end.output}\n(the program was ended: {end.how})".lstrip()

    return python
