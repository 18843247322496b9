"""The program inside a sandbox: it restricts its process irrevocably, then runs another program. It does not import
enginehouse.

Before the first line of that program, the process gives up all privileges. It can then no longer create a process, run
another program, signal or inspect another process, use a network, open a file outside its directory and the
interpreter's library, change an owner, a mode or a time stamp, outlive its parent, or exceed its limits.
docs/decisions/rewards.md names the mechanism of each restriction.

Messages are lines of JSON on a socket. A program that reads its input sends no messages. For a program under test, the
process evaluates expressions one by one and returns their values. The expected values never enter this process.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any

FILES, SYSTEM_CALLS = "files", "system calls"
"""Names of the restrictions that a machine may lack: Landlock and seccomp."""

_libc = ctypes.CDLL(None, use_errno=True)

# Privileges, limits, files

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CAPABILITY_VERSION_3 = 0x20080522

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of file rights for each version of Landlock."""

READABLE = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", os.path.join(sys.base_prefix, "lib")),
    *("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom", "/dev/zero"),
)
"""Paths that a program may read besides its own directory: the interpreter's library."""


def limit(limits: Mapping[str, int]) -> None:
    """Lower limits of this process, given by their names in `resource`."""
    for name, value in limits.items():
        resource_id = getattr(resource, name)
        hard = resource.getrlimit(resource_id)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(resource_id, (value, value))


def give_up_privileges(parent: int) -> None:
    """Drop all capabilities irrevocably, and let the kernel kill this process when `parent`, a process id, ends."""
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)))
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:  # the parent has ended meanwhile
        os._exit(1)


def restrict_files(directory: str) -> bool:
    """Restrict this process to files in one directory, without subdirectories, and to reading `READABLE`. Return False
    if the kernel has no Landlock."""
    version = _libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    all_rights = (1 << max(rights for since, rights in _RIGHTS_OF_ABI.items() if since <= version)) - 1
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    ruleset_attr = struct.pack("QQQ", all_rights, network, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = _libc.syscall(LANDLOCK_CREATE_RULESET, ruleset_attr, ctypes.c_size_t(len(ruleset_attr)), 0)
    if ruleset < 0:
        return False
    directory_rights = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
    for path, rights in {
        **dict.fromkeys(READABLE, _READ_FILE | _READ_DIR),
        "/dev/null": 6,
        directory: directory_rights,
    }.items():
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            rights &= _READ_FILE | _WRITE_FILE
        rule = struct.pack("=Qi", rights & all_rights, descriptor)
        _check(_libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0))
        os.close(descriptor)
    _check(_libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    return True


def _check(returned: int) -> None:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# System calls

_ALLOWED = (
    "read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 "
    "70, close 3 57, close_range 436 436, fstat 5 80, stat 4 -, lstat 6 -, newfstatat 262 79, statx 332 291, access "
    "21 -, faccessat 269 48, faccessat2 439 439, lseek 8 62, mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 "
    "216, madvise 28 233, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, "
    "rt_sigpending 127 136, rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132, pause 34 -, "
    "dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, getcwd 79 17, chdir 80 49, fchdir 81 50, "
    "getdents64 217 61, readlink 89 -, readlinkat 267 78, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 "
    "38, renameat2 316 276, ftruncate 77 46, fsync 74 82, fdatasync 75 83, flock 73 32, fallocate 285 47, fadvise64 "
    "221 223, getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176, "
    "getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgrp 111 -, getpgid 121 155, "
    "getsid 124 156, getrlimit 97 163, setrlimit 160 164, getrusage 98 165, times 100 153, uname 63 160, sysinfo 99 "
    "179, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 "
    "169, time 201 -, futex 202 98, set_robust_list 273 99, get_robust_list 274 100, rseq 334 293, set_tid_address "
    "218 96, sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120, "
    "getpriority 140 141, exit 60 93, exit_group 231 94, getrandom 318 278, select 23 -, pselect6 270 72, poll 7 -, "
    "ppoll 271 73, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 "
    "22, eventfd2 290 19, alarm 37 -, setitimer 38 103, getitimer 36 102, arch_prctl 158 -, restart_syscall 219 "
    "128, wait4 61 260, waitid 247 95, membarrier 324 283, statfs 137 43, fstatfs 138 44, umask 95 166, sendfile 40 "
    "71, copy_file_range 326 285, recvfrom 45 207, shutdown 48 210, getsockname 51 204, getsockopt 55 209, msync 26 "
    "227, mincore 27 232 "
)
"""System calls that a program may make with any arguments: name, number on x86_64, number on aarch64. All others fail
with EPERM, unless `_filter` allows them with certain arguments."""

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's number for each machine type in a filter."""

_LOAD, _AND, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
_KILL, _ERROR = 0x80000000, 0x00050000
_ALLOW = (_RETURN, 0, 0, 0x7FFF0000)
_REFUSE = (_RETURN, 0, 0, _ERROR | errno.EPERM)
_CLONE_THREAD = 0x10000
_NAME_OF_THREAD, _NAME_OF_MEMORY = 15, 0x53564D41
_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # terminal checks, readable bytes, flags
_HARMLESS_FCNTLS = (*range(8), 1030, 1032)  # duplicates, flags, locks; no F_SETOWN, which signals others

Instruction = tuple[int, int, int, int]


def restrict_system_calls() -> bool:
    """Restrict this process to system calls that cannot affect anything outside it. Return False without seccomp.

    Some calls depend on an argument: the process can create threads but no processes, and can signal only itself.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        return False
    filters = b"".join(struct.pack("HBBI", *instruction) for instruction in _filter(machine))
    buffer = ctypes.create_string_buffer(filters, len(filters))
    program = struct.pack("HP", len(filters) // 8, ctypes.addressof(buffer))
    return bool(_libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0) == 0)


def _filter(machine: str) -> Iterator[Instruction]:
    x86, own = machine == "x86_64", os.getpid()
    yield (_LOAD, 0, 0, 4)
    yield (_EQUAL, 1, 0, _MACHINES[machine])
    yield (_RETURN, 0, 0, _KILL)
    yield (_LOAD, 0, 0, 0)
    for entry in "".join(_ALLOWED).split(","):
        number = entry.split()[1 if x86 else 2]
        if number != "-":
            yield from _if_equal(int(number), [_ALLOW])
    yield from _if_equal(435, [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)])  # clone3: libc then takes clone
    yield from _if_equal(56 if x86 else 220, _allow_bits(0, _CLONE_THREAD))
    yield from _if_equal(62 if x86 else 129, _allow_values(0, [own]))  # kill
    yield from _if_equal(234 if x86 else 131, _allow_values(0, [own]))  # tgkill
    yield from _if_equal(157 if x86 else 167, _allow_values(0, [_NAME_OF_THREAD, _NAME_OF_MEMORY]))  # prctl
    yield from _if_equal(302 if x86 else 261, _allow_values(0, [0, own]))  # prlimit64
    yield from _if_equal(16 if x86 else 29, _allow_values(1, _HARMLESS_IOCTLS))
    yield from _if_equal(53 if x86 else 199, _allow_values(0, [1]))  # socketpair: of this process with itself
    yield from _if_equal(72 if x86 else 25, _allow_values(1, _HARMLESS_FCNTLS))
    no_address = [_load_argument(4, 4), *_if_equal(0, _allow_values(4, [0])), _REFUSE]
    yield from _if_equal(44 if x86 else 206, no_address)  # sendto: the other end of a pair
    if x86:
        yield from _if_equal(2, _refuse_truncation(1))  # open
    yield from _if_equal(257 if x86 else 56, _refuse_truncation(2))  # openat
    yield _REFUSE


def _if_equal(number: int, then: list[Instruction]) -> list[Instruction]:
    """Return instructions that run `then`, which must return, if the loaded value is `number`."""
    return [(_EQUAL, 0, len(then), number), *then]


def _allow_values(argument: int, values: Iterable[int]) -> list[Instruction]:
    """Allow a call if the lower half of an argument is one of `values`."""
    tests = [instruction for value in values for instruction in _if_equal(value, [_ALLOW])]
    return [_load_argument(argument), *tests, _REFUSE]


def _allow_bits(argument: int, bits: int) -> list[Instruction]:
    """Allow a call if an argument has one of `bits`."""
    return [_load_argument(argument), (_ANY_BIT, 0, 1, bits), _ALLOW, _REFUSE]


def _refuse_truncation(argument: int) -> list[Instruction]:
    """Allow a call unless it empties a file by opening it for reading, which older versions of Landlock permit as
    reading."""
    mask = (_AND, 0, 0, os.O_TRUNC | os.O_ACCMODE)
    return [_load_argument(argument), mask, (_EQUAL, 0, 1, os.O_TRUNC), _REFUSE, _ALLOW]


def _load_argument(number: int, half: int = 0) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * number + half)


# The program


def main(descriptor: int) -> None:
    line = os.fdopen(descriptor, "rb")
    setup = json.loads(line.readline())
    try:
        give_up_privileges(setup["parent"])
        limit(setup["limits"])
        restricted = {FILES: restrict_files(setup["directory"]), SYSTEM_CALLS: restrict_system_calls()}
    except BaseException as error:
        _write(line, {"error": f"{type(error).__name__}: {error}"})
        return
    _write(line, {"missing": [name for name, is_restricted in restricted.items() if not is_restricted]})
    request = json.loads(line.readline() or b"{}")
    if "program" not in request:
        return
    os.environ.clear()
    os.environ.update(setup["environment"])
    sys.argv = ["program"]
    if request["tested"]:
        _serve(line, _run(request["program"], "program"))
    else:
        line.close()
        _run(request["program"], "__main__")


def _run(source: str, name: str) -> dict[str, Any]:
    """Run a program as a module called `name`; return the names that it defines."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module.__dict__


def _serve(line: Any, names: dict[str, Any]) -> None:
    """Run statements and evaluate expressions over a program's names, as they arrive."""
    _write(line, {"ready": True})
    for text in iter(line.readline, b""):
        message = json.loads(text)
        try:
            if "run" in message:
                exec(compile(message["run"], "test.py", "exec"), names)
                answer = {"done": message["token"]}
            else:
                value = eval(compile(message["evaluate"], "test.py", "eval"), names)
                answer = {"value": repr(to_literal(value))}
        except BaseException as error:
            answer = {"raised": type(error).__name__}
        _write(line, answer)


def to_literal(value: Any) -> Any:
    """Return an equal value that a literal can express, if there is one.

    For example, return a dict for a `Counter`, and a float for a `Fraction`.
    """
    if isinstance(value, dict):
        return {to_literal(key): to_literal(item) for key, item in value.items()}
    for kind, builtin in ((list, list), (tuple, tuple), (Set, set)):
        if isinstance(value, kind):
            return builtin(to_literal(item) for item in value)
    simple: Any
    for simple in (bool, int, float, complex, str, bytes):
        if isinstance(value, simple):
            return simple(value)
    for number in (int, float):
        with suppress(Exception):
            if (converted := number(value)) == value:
                return converted
    return value


def _write(line: Any, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(line.fileno(), data) :]


if __name__ == "__main__":
    main(int(sys.argv[1]))
