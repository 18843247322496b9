from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from enginehouse.errors import ConfigError, nearest
from enginehouse.plugin import checked_reward
from enginehouse.plugin.references import parse
from enginehouse_rewards import sandbox
from enginehouse_rewards.sandbox import Isolation, Sandbox, SandboxError

_BLOCK = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def check(arguments: Mapping[str, Any], columns: Sequence[str] | None) -> None:
    """Reject columns that the data lacks, and a machine that cannot isolate a program."""
    inputs, outputs, asserts = (arguments.get(f"{name}_column") for name in ("inputs", "outputs", "asserts"))
    if bool(inputs) != bool(outputs) or not (inputs or asserts):
        raise ConfigError(
            "the reward 'code' needs inputs_column and outputs_column, or asserts_column, or all three: the names of "
            "columns with tests"
        )
    for name in filter(None, (inputs, outputs, asserts)):
        if columns is not None and name not in columns:
            raise ConfigError(f"the reward 'code' needs the column {name!r} with tests. {nearest(name, columns)}")
    if arguments.get("isolation", "required") == "required":
        try:
            sandbox.check_isolation()
        except SandboxError as error:
            raise ConfigError(str(error)) from error


@checked_reward(check)
def code(
    response: str,
    *,
    inputs_column: str | None = None,
    outputs_column: str | None = None,
    asserts_column: str | None = None,
    credit: Literal["share", "all"] = "share",
    seconds: Annotated[float, Field(gt=0)] = 4.0,
    total_seconds: Annotated[float, Field(gt=0)] = 20.0,
    memory_mb: Annotated[int, Field(ge=64)] = 1024,
    isolation: Isolation = "required",
    **columns: Any,
) -> float:
    """Run the program in the response's last code block against tests, and return the fraction that passes.

    The program is Python with the standard library. docs/trust.md describes the limits of a program, and what happens
    if it exceeds them. A response without a code block passes no test.

    Args:
        inputs_column: column of the data with a list of texts, each the standard input of a run.
        outputs_column: column with the expected output of each run; white space at the ends of lines is ignored.
        asserts_column: column with `assert` statements, as a list or a text; other statements among them are also run,
            in order.
        credit: `share`: the fraction of tests that pass; `all`: 1.0 if all pass, else 0.0.
        seconds: time limit for a run, or for all asserts of a response.
        total_seconds: time limit for a response; remaining tests then count as failed. Keep it a few seconds below
            `reward.timeout_seconds`.
        memory_mb: maximum address space of a program, in MiB.
        isolation: `required`: nothing is run if the machine cannot isolate programs; `best`: as isolated as the machine
            allows.
    """
    until = time.monotonic() + total_seconds

    def start(standard_input: str = "") -> Sandbox:
        return Sandbox(max(min(seconds, until - time.monotonic()), 0.01), memory_mb, isolation, standard_input)

    inputs, outputs = (_list_texts(columns[name]) if name else [] for name in (inputs_column, outputs_column))
    asserts = "\n".join(_list_texts(columns[asserts_column])) if asserts_column else ""
    tests = parse(asserts).body
    number = len(inputs) + sum(map(_is_test, tests))
    if len(inputs) != len(outputs) or not number:
        raise ValueError(
            f"a row must have as many inputs as outputs and at least one test, but has {len(inputs)} inputs, "
            f"{len(outputs)} outputs and {number} tests"
        )
    blocks = _BLOCK.findall(response)
    if not blocks:
        return 0.0
    passed = 0
    for right in _run_tests(blocks[-1], zip(inputs, outputs, strict=True), tests, start):
        passed += right
        if time.monotonic() > until or (credit == "all" and not right):
            break
    return float(passed == number) if credit == "all" else passed / number


def _run_tests(program: str, runs: Iterable[tuple[str, str]], tests: Sequence[ast.stmt], start: Any) -> Iterator[bool]:
    """Yield for each test, in order, True if the program passes it."""
    for given, expected in runs:
        with start(given) as process:
            end = process.run(program)
        yield end.well and _split_lines(end.output) == _split_lines(expected)
    if not tests:
        return
    with start() as process:
        is_loaded = process.load(program)
        for test in tests:
            right = is_loaded and _holds(process, test)
            if _is_test(test):
                yield right


def _holds(process: Sandbox, test: ast.stmt) -> bool:
    """True if a statement holds. If it compares an expression with a literal, the sandbox never gets the literal."""
    if isinstance(test, ast.Assert) and isinstance(test.test, ast.Compare) and len(test.test.ops) == 1:
        left, right = test.test.left, test.test.comparators[0]
        if isinstance(test.test.ops[0], ast.Eq):
            for expression, expected in ((left, right), (right, left)):
                try:
                    value = ast.literal_eval(expected)
                except (ValueError, TypeError):
                    continue
                return process.evaluate(ast.unparse(expression), value)
    return process.do(ast.unparse(test))


def _is_test(statement: ast.stmt) -> bool:
    """True if a statement can fail a program: an assertion, or a call of a `check` that was defined before."""
    return isinstance(statement, ast.Assert | ast.Expr)


def _list_texts(column: Any) -> list[str]:
    return [column] if isinstance(column, str) else [str(text) for text in column or ()]


def _split_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
