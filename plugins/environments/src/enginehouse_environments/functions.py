"""Makes tools from typed functions. Signature and docstring give the schema, and the arguments of calls are checked."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired, get_type_hints

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from enginehouse.errors import ConfigError, first_line, nearest
from enginehouse.plugin import ResolveError, resolve
from enginehouse_environments.threads import run_in_thread

log = logging.getLogger(__name__)

FIRST_CALLS = 8
"""If this many of a tool's first calls all fail, the tool is suspected, and not the policy."""

BUILT_IN = {
    name: f"enginehouse_environments.builtin_tools.{name}:make_{name}" for name in ("calculator", "python", "search")
}
"""Functions that create the built-in tools, by the tools' names, from arguments in a config."""


class ToolError(Exception):
    """A call failed; the policy gets the message."""


class Tool:
    """A function that the policy may call.

    Args:
        function: a typed function, async or not, whose docstring describes it and, below `Args:`, each argument. If it
            has an attribute `prepare`, this is called once in the process where the function will run.

    Attributes:
        schema: schema in the form of OpenAI's `tools`.

    Raises:
        ConfigError: the function lacks types or a docstring, or a schema cannot express its types.
    """

    def __init__(self, function: Callable[..., Any]):
        self.name, self._function = getattr(function, "__name__", type(function).__name__), function
        self.schema = _make_schema(function, self.name)
        self._arguments = _make_checker(function, self.name)
        self.prepare: Callable[[], Any] = getattr(function, "prepare", lambda: None)
        self._failures: int | None = 0  # None once a call succeeded, or after the warning

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """Return the result as text: a string unchanged, other values as JSON.

        Args:
            arguments: the policy's arguments, which are checked.
            seconds: time limit. A thread cannot be ended, so it continues to run.

        Raises:
            ToolError: the call failed for any reason.
        """
        try:
            checked = self._arguments.validate_python(dict(arguments))
        except ValidationError as error:
            raise ToolError(_describe_problems(error)) from error
        calling = asyncio.create_task(self._run(checked))
        try:
            await asyncio.wait((calling,), timeout=seconds)
        finally:
            calling.cancel()
        if not calling.done():
            raise self._make_error(f"it took more than {seconds:g} s")
        if calling.cancelled():
            raise self._make_error("it was cancelled")
        result, raised = calling.result()
        if raised is not None:
            name = type(raised).__name__
            raise self._make_error(f"{name}: {raised}" if str(raised) else name, raised) from raised
        self._failures = None
        return result

    def _make_error(self, message: str, raised: BaseException | None = None) -> ToolError:
        """Return the error of a failed call. Warn once if the tool has never worked."""
        if self._failures is not None:
            self._failures += 1
            if self._failures == FIRST_CALLS:
                self._failures = None
                log.warning(
                    "each of the first %d calls of the tool %r failed, the last: %s. The model is told, and the run "
                    "continues. If the tool is at fault, call it by hand, await its coroutines, or raise tool_seconds",
                    FIRST_CALLS, self.name, message, exc_info=raised,
                )  # fmt: skip
        return ToolError(message)

    async def _run(self, arguments: Mapping[str, Any]) -> tuple[str, BaseException | None]:
        """Return the result and the exception, if any. It is returned and not raised, because some exceptions would end
        the event loop if a task raised them."""
        try:
            if inspect.iscoroutinefunction(self._function):
                return _write_result(await self._function(**arguments)), None
            return await run_in_thread(lambda: _write_result(self._function(**arguments)), "tool"), None
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            return "", error


def make_tools(entries: Sequence[str | Mapping[str, Any]]) -> list[Tool]:
    """Make the tools that a config names.

    Args:
        entries: names of built-in tools, or `"module:function"`; or mappings of a `name` and the arguments of the
            function that makes the tool.

    Raises:
        ConfigError: a tool does not exist or cannot be made.
    """
    tools = [_make_tool(entry) for entry in entries]
    names = [tool.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"tools: two tools have the name {min(twice)!r}, so the model could not tell them apart")
    return tools


def _make_tool(entry: str | Mapping[str, Any]) -> Tool:
    arguments = {} if isinstance(entry, str) else dict(entry)
    name = entry if isinstance(entry, str) else arguments.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"tools: {entry!r} has no name. {nearest('', BUILT_IN)}. Name your own tool as module:function"
        )
    if ":" not in name and name not in BUILT_IN:
        raise ConfigError(
            f"tools: unknown tool {name!r}. {nearest(name, BUILT_IN)}. Name your own tool as module:function"
        )
    try:
        function = resolve(BUILT_IN.get(name, name))
    except ResolveError as error:
        raise ConfigError(f"tools: {error}") from error
    if name in BUILT_IN or arguments:
        try:
            arguments = _make_checker(function, name).validate_python(arguments)
        except ValidationError as error:
            takes = ", ".join(inspect.signature(function).parameters) or "no arguments"
            raise ConfigError(f"tools: {name}: {_describe_problems(error)}. It takes {takes}") from error
        function = function(**arguments)
    if not callable(function):
        raise ConfigError(f"tools: {name!r} is {type(function).__name__}, not a function")
    return Tool(function)


def _make_schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # errors of several kinds, none of which is public
        problem = first_line(error).rstrip(".!")
        raise ConfigError(
            f"tools: {name!r} cannot be described to the model: {problem}. A tool must have a type for each argument, "
            "and a docstring that describes the tool and, below `Args:`, each argument"
        ) from error
    schema["function"].pop("return", None)  # servers omit it, so no model has seen it in training
    return schema


def _make_checker(function: Callable[..., Any], name: str) -> TypeAdapter[dict[str, Any]]:
    """Return the checker of a function's arguments, which also accepts numbers as text."""
    try:
        hints, parameters = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
        fields = {}
        for key, parameter in parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise TypeError(f"it takes any arguments (*{key})")
            hint = hints.get(key, Any)
            fields[key] = hint if parameter.default is parameter.empty else NotRequired[hint]
        make_typed_dict: Any = TypedDict  # mypy rejects fields that are no literal
        typed_dict = make_typed_dict("Arguments", fields)
        typed_dict.__pydantic_config__ = ConfigDict(extra="forbid")
        return TypeAdapter(typed_dict)
    except (TypeError, NameError, ValueError, PydanticSchemaGenerationError) as error:
        raise ConfigError(f"tools: the arguments of {name!r} cannot be checked: {error}") from error


def _describe_problems(error: ValidationError) -> str:
    """Describe up to four wrong arguments."""
    return "; ".join(map(_describe_problem, error.errors()[:4]))


def _describe_problem(detail: Any) -> str:
    where = ".".join(map(str, detail["loc"]))
    if detail["type"] == "missing":
        return f"the argument {where!r} is missing"
    if detail["type"] == "extra_forbidden":
        return f"there is no argument {where!r}"
    return f"{where}: {detail['msg']}"


def _write_result(result: Any) -> str:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("it returned a coroutine: define the tool by `async def`")
    if isinstance(result, str):
        return result
    return json.dumps(to_jsonable_python(result, fallback=str), ensure_ascii=False)
