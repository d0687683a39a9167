"""A short time slice for the daemon's loop, so that it answers while engines keep every processor busy.

Under EEVDF (Linux 6.12 and later) a thread that asks for a slice of 0.1 ms may preempt one in the middle of its 3 ms
slice when it wakes up; it gets no more time than its share. Needs no privilege. Source: Linux, sched(7) and
kernel/sched/syscalls.c (sched_setattr with SCHED_OTHER takes sched_runtime as the slice, 0.1 to 100 ms).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading

LOOP_SLICE_S = 0.0001
_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""System calls sched_setattr and sched_getattr."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
"""size, policy, flags, nice, priority, runtime ns, deadline ns, period ns, utilisation min and max."""


def ask_for_short_slices(slice_s: float = LOOP_SLICE_S) -> bool:
    """For the calling thread. False where this kernel or machine has no such thing; nothing has changed then."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, int(slice_s * 1e9), 0, 0, 0, 0)
    if ctypes.CDLL(None).syscall(numbers[0], 0, wanted, 0):
        return False
    got = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if ctypes.CDLL(None).syscall(numbers[1], 0, got, _ATTRIBUTES.size, 0):
        return False
    return bool(_ATTRIBUTES.unpack(got.raw)[5] == int(slice_s * 1e9))


def be_nicer(by: int) -> None:
    """Lower the calling thread's priority (raise its nice value) by so much, to 19 at most. Needs no privilege."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + by))
