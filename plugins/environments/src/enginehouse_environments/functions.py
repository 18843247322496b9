"""Typed functions as tools: the schema of one, by its signature and docstring, and a call of it."""

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
from enginehouse_environments.threads import in_thread

log = logging.getLogger(__name__)

FIRST_CALLS = 8
"""Where so many first calls of a tool all failed, that is hardly the policy's mistake."""

BUILT_IN = {
    name: f"enginehouse_environments.builtin_tools.{name}:make_{name}" for name in ("calculator", "python", "search")
}
"""By name, what makes a tool of the arguments that a config gives it."""


class ToolError(Exception):
    """A call that failed, in words for the policy."""


class Tool:
    """A function that the policy may call.

    Args:
        function: typed, and with a docstring that says what it does and, below `Args:`, what each argument is; async or
            not. It may have a `prepare`, called once where it is to run.

    Attributes:
        name: the function's.
        schema: as one of OpenAI's `tools`.

    Raises:
        ConfigError: it has no types or no docstring, or they cannot be said in a schema.
    """

    def __init__(self, function: Callable[..., Any]):
        self.name, self._function = getattr(function, "__name__", type(function).__name__), function
        self.schema = _schema(function, self.name)
        self._arguments = _arguments(function, self.name)
        self.prepare: Callable[[], Any] = getattr(function, "prepare", lambda: None)
        self._failures: int | None = 0  # so far, while no call went well

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """What it gives, as text: a string as it is, all else as JSON.

        Args:
            arguments: as the policy says them.
            seconds: longest time. What takes longer is not waited for; a thread, which cannot be ended, goes on.

        Raises:
            ToolError: in words, whatever went wrong.
        """
        try:
            given = self._arguments.validate_python(dict(arguments))
        except ValidationError as error:
            raise ToolError("; ".join(_problem(one) for one in error.errors()[:4])) from error
        calling = asyncio.create_task(self._outcome(given))
        try:
            await asyncio.wait((calling,), timeout=seconds)
        finally:
            calling.cancel()
        if not calling.done():
            raise self._failed(f"it took more than {seconds:g} s")
        if calling.cancelled():
            raise self._failed("it was cancelled")
        result, raised = calling.result()
        if raised is not None:
            name = type(raised).__name__
            raise self._failed(f"{name}: {raised}" if str(raised) else name, raised) from raised
        self._failures = None
        return result

    def _failed(self, said: str, raised: BaseException | None = None) -> ToolError:
        """What the policy is told of a call that failed; a tool that never works is warned of, once."""
        if self._failures is not None:
            self._failures += 1
            if self._failures == FIRST_CALLS:
                self._failures = None
                log.warning(
                    "each of the first %d calls of the tool %r failed, the last: %s. That is told to the model and "
                    "ends nothing. If the tool is at fault, call it by hand, await what it awaits, raise tool_seconds",
                    FIRST_CALLS, self.name, said, exc_info=raised,
                )  # fmt: skip
        return ToolError(said)

    async def _outcome(self, given: Mapping[str, Any]) -> tuple[str, BaseException | None]:
        """What it gives, or what it raised; that does not leave a task, as some of it would end the event loop."""
        try:
            if inspect.iscoroutinefunction(self._function):
                return _text(await self._function(**given)), None
            return await in_thread(lambda: _text(self._function(**given)), "tool"), None
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            return "", error


def make_tools(given: Sequence[str | Mapping[str, Any]]) -> list[Tool]:
    """The tools that a config names.

    Args:
        given: of each `"name"` of one that is built in, or `"module:function"`; or a mapping of its `name` and the
            arguments of what makes it.

    Raises:
        ConfigError: naming the one that there is not, or that cannot be made.
    """
    tools = [_made(one) for one in given]
    names = [tool.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"tools: two are called {min(twice)!r}; the model could not tell them apart")
    return tools


def _made(given: str | Mapping[str, Any]) -> Tool:
    arguments = {} if isinstance(given, str) else dict(given)
    name = given if isinstance(given, str) else arguments.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"tools: {given!r} has no name. {nearest('', BUILT_IN)}; one of your own is named module:function"
        )
    if ":" not in name and name not in BUILT_IN:
        raise ConfigError(
            f"tools: there is no tool {name!r}: {nearest(name, BUILT_IN)}; one of your own is named module:function"
        )
    try:
        found = resolve(BUILT_IN.get(name, name))
    except ResolveError as error:
        raise ConfigError(f"tools: {error}") from error
    if name in BUILT_IN or arguments:
        try:
            arguments = _arguments(found, name).validate_python(arguments)
        except ValidationError as error:
            problems = "; ".join(_problem(one) for one in error.errors()[:4])
            takes = ", ".join(inspect.signature(found).parameters) or "no arguments"
            raise ConfigError(f"tools: {name}: {problems}. It takes {takes}") from error
        found = found(**arguments)
    if not callable(found):
        raise ConfigError(f"tools: {name!r} is {type(found).__name__}, not a function")
    return Tool(found)


def _schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # of several kinds, none of which is public
        said = first_line(error).rstrip(".!")
        raise ConfigError(
            f"tools: {name!r} cannot be described to the model: {said}. A tool has a type for each argument, and a "
            "docstring that says what it does and, below `Args:`, what each argument is"
        ) from error
    schema["function"].pop("return", None)  # no server of models says it, so none has learned it
    return schema


def _arguments(function: Callable[..., Any], name: str) -> TypeAdapter[dict[str, Any]]:
    """What checks the arguments of a call; text that says a number is taken for one."""
    try:
        hints, parameters = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
        if star := [one.name for one in parameters.values() if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]:
            raise TypeError(f"it takes any arguments (*{star[0]})")
        fields = {
            key: hints.get(key, Any) if one.default is one.empty else NotRequired[hints.get(key, Any)]
            for key, one in parameters.items()
        }
        typed: Any = TypedDict  # of fields that are not written here
        made = typed("Arguments", fields)
        made.__pydantic_config__ = ConfigDict(extra="forbid")
        return TypeAdapter(made)
    except (TypeError, NameError, ValueError, PydanticSchemaGenerationError) as error:
        raise ConfigError(f"tools: the arguments of {name!r} cannot be checked: {error}") from error


def _problem(detail: Any) -> str:
    """What is wrong with an argument."""
    where = ".".join(map(str, detail["loc"]))
    if detail["type"] == "missing":
        return f"the argument {where!r} is missing"
    if detail["type"] == "extra_forbidden":
        return f"there is no argument {where!r}"
    return f"{where}: {detail['msg']}"


def _text(result: Any) -> str:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("it gave what has to be awaited: define it by `async def`")
    if isinstance(result, str):
        return result
    return json.dumps(to_jsonable_python(result, fallback=str), ensure_ascii=False)
