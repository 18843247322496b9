"""A tool for arithmetic, which cannot run for long or do anything else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MOST_CHARACTERS = 1000
MOST_BITS = 8192
"""Maximum number of bits of an integer, including intermediate results."""

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (abs, max, min, round)},
    **{name: getattr(math, name) for name in ("ceil", "floor", "sqrt", "exp", "log", "sin", "cos", "tan")},
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def make_calculator() -> Callable[[str], str]:
    return calculator


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, pi, e, and the functions abs, ceil, cos, exp, floor,
            log, max, min, round, sin, sqrt, tan.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"the expression has more than {MOST_CHARACTERS} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"this is no expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("the expression is nested too deeply") from None
    except OverflowError:
        raise ValueError("the result is no finite number") from None
    except TypeError as error:
        raise ValueError(str(error)) from None
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(float(f"{value:.15g}"))


def _evaluate(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _check_bounds(node.value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _check_bounds(_OPERATORS[type(op)](_evaluate(operand)))
        case ast.BinOp(left=left, op=ast.BitXor()):
            raise ValueError("write ** for a power")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _operate(op, _evaluate(left), _evaluate(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _call(name, [_evaluate(argument) for argument in arguments])
    raise ValueError(f"{ast.unparse(node)[:40]} is not supported")


def _operate(op: ast.AST, left: int | float, right: int | float) -> int | float:
    is_power = isinstance(op, ast.Pow) and isinstance(left, int) and isinstance(right, int)
    if is_power and int(left).bit_length() * right > MOST_BITS:
        raise ValueError("the number is too large")
    return _check_bounds(_OPERATORS[type(op)](left, right))


def _call(name: str, arguments: list[int | float]) -> int | float:
    if name == "round" and len(arguments) == 2 and not -MOST_CHARACTERS < arguments[1] < MOST_CHARACTERS:
        raise ValueError("the number of digits for round is too large")
    return _check_bounds(_FUNCTIONS[name](*arguments))


def _check_bounds(value: Any) -> int | float:
    if isinstance(value, complex) or not isinstance(value, int | float):
        raise ValueError("the result is no real number")
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise ValueError("the number is too large")
    elif not math.isfinite(value):
        raise ValueError("the result is no finite number")
    return value
