"""A plugin whose transports damage what they carry: the faults of the weight-sync tests, under names of their own."""

from enginehouse.plugin import Transport, hookimpl
from enginehouse.plugin.capabilities import SAME_HOST, SAME_PROCESS

enginehouse_protocol = "1.0"

FAULTS = {
    "corrupting_inproc": ("CorruptingInproc", SAME_PROCESS),
    "dropping_inproc": ("DroppingInproc", SAME_PROCESS),
    "corrupting_shared_memory": ("CorruptingSharedMemory", SAME_HOST),
    "dropping_shared_memory": ("DroppingSharedMemory", SAME_HOST),
}


@hookimpl
def enginehouse_register_transports(register):
    for name, (cls, reach) in FAULTS.items():
        register(
            Transport(
                name=name,
                summary="Damages a parameter at the second update",
                transport=f"weights.faults:{cls}",
                capabilities={reach},
            )
        )
