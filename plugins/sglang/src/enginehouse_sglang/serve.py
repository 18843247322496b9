"""`python -m enginehouse_sglang.serve ARGUMENTS`: SGLang's own server, on a CPU too.

The same as `python -m sglang.launch_server ARGUMENTS`. Where that runs on a CPU, what SGLang lacks there is stood in
for, in this process and in each that SGLang starts: a process started by `multiprocessing` imports the main module of
the one that started it, which is this.
"""

from __future__ import annotations

import runpy
import sys

from enginehouse_sglang import on_cpu

if on_cpu.is_cpu(sys.argv[1:]):
    on_cpu.adapt()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
