"""`python -m enginehouse_sglang.serve ARGUMENTS` runs SGLang's own server, also on a CPU.

It is `python -m sglang.launch_server ARGUMENTS` with stand-ins for what SGLang lacks on a CPU. Each process that SGLang
starts has them too, because `multiprocessing` imports its parent's main module there, which is this one.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

from enginehouse_sglang import on_cpu
from enginehouse_sglang.process import KEYS, KEYS_VARIABLE

SECRET_SETTINGS = frozenset({*KEYS, "launch_command"})
"""Entries of `/server_info` that hold keys."""

if on_cpu.is_cpu(sys.argv[1:]):
    on_cpu.adapt()
if "--enable-lora" in sys.argv:  # imports torch, which must see what was adapted
    from enginehouse_sglang import adapter_loader
    from enginehouse_sglang.on_cpu import adapters

    adapter_loader.install()
    if on_cpu.is_cpu(sys.argv[1:]):
        adapters.install()


def _hide_keys() -> None:
    """Leave the keys out of `GET /server_info`, which answers everyone with all arguments of the server.

    Stands in for `build_server_info` (srt/utils/common.py:3584 in 0.5.23), until that redacts them.
    """
    from sglang.srt.entrypoints import http_server

    build = http_server.build_server_info

    def build_without_keys(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value for name, value in build(*args, **kwargs).items() if name not in SECRET_SETTINGS}

    http_server.build_server_info = build_without_keys


if __name__ == "__main__":
    _hide_keys()
    sys.argv += json.loads(os.environ.pop(KEYS_VARIABLE, "[]"))
    runpy.run_module("sglang.launch_server", run_name="__main__")
