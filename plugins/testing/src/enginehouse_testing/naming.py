"""Finds the record that a name stands for, and checks the arguments and data that an author gives with it."""

from __future__ import annotations

import inspect
import os
from typing import Any

from enginehouse.engines.declared import find_faults
from enginehouse.errors import UserError
from enginehouse.plugin import KINDS as RECORDS
from enginehouse.plugin import Advantage, Function, Loss, PluginLookupError, Reward, plugins, resolve
from enginehouse_rl.plan.arguments import check_call, check_values
from enginehouse_rl.plan.functions import extend_path, find_function
from enginehouse_testing.given import NAMED_BY_MODULE, Given


def record_of(kind: str, named: Any) -> Any:
    """Return the record of a kind: a registered one, one built from `"module:attribute"`, or `named` if it is a record.

    Raises:
        UserError: nothing has this name.
    """
    if not isinstance(named, str):
        return named
    manager = plugins()
    if kind not in NAMED_BY_MODULE:
        return manager.get(kind, named, elsewhere=kind == "rollout")
    if manager.is_name(named):
        try:
            return manager.get(kind, named)
        except PluginLookupError as error:
            if error.reason == "unknown":
                error.args = (f"{error} (name your own code as module:attribute)", *error.args[1:])
            raise
    extend_path([os.getcwd()])
    find_function(manager, Function, named, kind, [os.getcwd()], always=True)
    cls = next(record for record in RECORDS if record.kind == kind)
    return cls(name=named, **{cls.references[0]: named})


def check_given(record: Any, given: Given) -> None:
    """Check the arguments and data for a record, as `enginehouse plan` does, before anything runs.

    Raises:
        UserError: the record's function or class is not of its kind, or does not take exactly these arguments.
    """
    if record.kind not in NAMED_BY_MODULE:
        return
    for fault in find_faults(record):
        raise UserError(fault.what)
    called = resolve(getattr(record, record.references[0]))
    if isinstance(record, Reward):
        from enginehouse_testing.reward_trial import check_examples

        check_examples(record, given)
    else:
        positional = int(isinstance(record, Loss | Advantage))
        title = f"{record.kind} {record.name!r}"
        check_call(called, title, given.arguments, title, positional=positional, called="it")
    checked = called.__init__ if inspect.isclass(called) else called
    _, problems = check_values(checked, "arguments", given.arguments)
    if problems:
        raise UserError(f"{record.kind} {record.name!r}: {'; '.join(problems)}")
