"""`--json` writes events of the run to standard output, one JSON object a line, and nothing else.

Each object has the key `event`, and these keys:

| event | when | keys |
|---|---|---|
| `plan` | first, once the plan is accepted | `run`, `directory`, `plan`: what `enginehouse plan` prints |
| `start` | before the first step | `steps`: all steps of the run; `done`: the steps that earlier processes took |
| `step` | after each step | `step`, `metrics`: as in `metrics.jsonl` |
| `validation` | after each validation | `step`, `metrics`: as in `validation.jsonl`; `how`: such as `greedy` |
| `alarm` | once for each alarm | `step`, `alarm`, `said`, `advice`: as in `alarms.jsonl` |
| `note` | at any time | `text` |
| `saved` | after each model and checkpoint | `step`, `what`: `model` or `state`, `path` |
| `end` | last | `status`: `finished`, `interrupted` or `failed`; `steps`, `directory`, `model`, `alarms`, `error` |

In `end`, `steps` is the last step whose metrics were written, and `model` is the path of the newest model or null. A
rejected config causes no event: the exit code is 2, and the reason is on standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from enginehouse_rl.runs.jsonlines import encode_row

Emit = Callable[..., None]
"""Writes an event, given its name and content."""


@contextlib.contextmanager
def events_on_stdout() -> Iterator[Emit]:
    """Take over standard output, and yield the function that writes events there.

    Meanwhile other output, for example from a library, a reward or a worker, goes to standard error. If the reader goes
    away, the run continues without it. Nothing is written after `end`, even if a slow shutdown is cut off.
    """
    has_ended = False
    sys.stdout.flush()
    output, lock = os.dup(1), threading.Lock()
    os.dup2(2, 1)

    def emit(event: str, **content: Any) -> None:
        nonlocal has_ended
        line = (encode_row({"event": event, **content}) + "\n").encode("utf-8", "backslashreplace")
        with lock, contextlib.suppress(OSError):
            line, has_ended = b"" if has_ended else line, has_ended or event == "end"
            while line:
                line = line[os.write(output, line) :]

    try:
        yield emit
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # buffered output was meant for standard error
        os.dup2(output, 1)
        os.close(output)
