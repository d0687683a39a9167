"""Notifications as systemd receives them: datagrams on a real socket, by path and in the abstract namespace."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

from kvstore.notify import Notifier


@pytest.mark.parametrize("abstract", [False, True])
def test_messages_arrive(tmp_path: Path, abstract: bool) -> None:
    address = f"@kvstore-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + address[1:] if abstract else address)
        receiver.settimeout(5)
        notifier = Notifier(address)
        notifier.status("filling", extend_s=1.5)
        notifier.ready("serving")
        notifier.reloading()
        notifier.stopping("draining")
        messages = [receiver.recv(4096).decode() for _ in range(4)]
    assert messages[0] == "STATUS=filling\nEXTEND_TIMEOUT_USEC=1500000"
    assert messages[1] == "READY=1\nSTATUS=serving"
    assert messages[2].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert messages[3] == "STOPPING=1\nSTATUS=draining"


def test_nobody_asking_and_a_lost_supervisor_are_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Notifier(None).ready("x")
    Notifier("").ready("x")
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        Notifier(str(tmp_path / "gone")).ready("x")
    assert [record.getMessage() for record in caplog.records] == ["systemd was not notified"]
