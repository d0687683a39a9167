"""The loop's short slices: asked for by the thread itself, seen by the kernel, and never a reason to fail."""

from __future__ import annotations

import os
import platform
import threading

import pytest

from kvstore.scheduling import ask_for_short_slices

_KERNEL = tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])


@pytest.mark.skipif(_KERNEL < (6, 12), reason=f"custom slices came with Linux 6.12, this is {platform.release()}")
def test_a_thread_gets_the_slice_it_asks_for_and_keeps_its_nice_value() -> None:
    got: list[object] = []

    def ask() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        got.extend((ask_for_short_slices(0.0002), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert got == [True, 3]


def test_a_slice_that_the_kernel_does_not_allow_changes_nothing() -> None:
    assert not ask_for_short_slices(10.0)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
