"""`python -m enginehouse_sglang.serve ARGUMENTS`: SGLang's own server, on a CPU too.

The same as `python -m sglang.launch_server ARGUMENTS`. Where that runs on a CPU, what SGLang lacks there is stood in
for, in this process and in each that SGLang starts: a process started by `multiprocessing` imports the main module of
the one that started it, which is this.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

from enginehouse_sglang import on_cpu
from enginehouse_sglang.process import KEYS, KEYS_VARIABLE

TOLD_TO_NOBODY = frozenset({*KEYS, "launch_command"})
"""Of what `/server_info` says: keys, and the command that has them."""

if on_cpu.is_cpu(sys.argv[1:]):
    on_cpu.adapt()


def _tell_no_keys() -> None:
    """Leave the keys out of `GET /server_info`, which SGLang answers to everyone with all of its arguments.

    Stands in for `build_server_info` (srt/utils/common.py:3584 in 0.5.23) where the server uses it, until that redacts
    them.
    """
    from sglang.srt.entrypoints import http_server

    build = http_server.build_server_info

    def without_keys(*given: Any, **named: Any) -> dict[str, Any]:
        return {name: said for name, said in build(*given, **named).items() if name not in TOLD_TO_NOBODY}

    http_server.build_server_info = without_keys


if __name__ == "__main__":
    _tell_no_keys()
    sys.argv += json.loads(os.environ.pop(KEYS_VARIABLE, "[]"))
    runpy.run_module("sglang.launch_server", run_name="__main__")
