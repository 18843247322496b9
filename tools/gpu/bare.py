"""A pytest plugin (`-p tools.gpu.bare`) that hides modules that a bare machine lacks, even while collecting tests."""

import sys
from importlib.abc import MetaPathFinder

ABSENT = ("datasets", "fastapi", "megatron", "msgspec", "ray", "sglang", "tensorboardX", "vllm")


class _Absent(MetaPathFinder):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


if there := [name for name in ABSENT if name in sys.modules]:
    raise ImportError(f"these are imported already, and cannot be hidden: {', '.join(there)}")
sys.meta_path.insert(0, _Absent())
