"""The daemon's life: start, READY, reload, drain, restart, and the ways in which a start must be refused."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import KVSTORE, Cli

from kvstore.testing.daemon import DaemonProcess
from kvstore.units import MiB

Make = Callable[..., DaemonProcess]


def at(daemon: DaemonProcess) -> dict[str, str]:
    return {"KVSTORE_SOCKET_PATH": str(daemon.socket_path)}


def wait_for(what: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def flip_on_disk(folder: Path, needle: bytes) -> None:
    """Change one bit in the first place under `folder` that holds `needle`."""
    for path in sorted(folder.rglob("*.kvs")):
        data = path.read_bytes()
        where = data.find(needle)
        if where >= 0:
            with path.open("r+b") as file:
                file.seek(where)
                file.write(bytes([data[where] ^ 1]))
            return
    raise AssertionError("the bytes are not on disk")


def test_an_orderly_stop_writes_everything_and_a_restart_serves_it(cli: Cli, make_daemon: Make) -> None:
    daemon = make_daemon(arena_bytes=64 * MiB)
    data = os.urandom(24 * MiB)
    assert cli("put", "a", stdin=data, environ=at(daemon)).code == 0
    assert daemon.stop() == 0
    assert not daemon.socket_path.exists()
    daemon.start()
    result = cli("get", "a", environ=at(daemon))
    assert (result.code, result.out == data) == (0, True)


def test_after_a_kill_a_file_that_was_durable_is_there(cli: Cli, make_daemon: Make) -> None:
    daemon = make_daemon(arena_bytes=64 * MiB)
    assert cli("put", "--durable", "a", stdin=b"kept", environ=at(daemon)).code == 0
    daemon.kill()
    assert cli("ping", environ=at(daemon)).code == 3
    daemon.start()
    assert cli("get", "a", environ=at(daemon)).out == b"kept"


def test_a_flipped_byte_is_exit_7_and_fsck_finds_it(cli: Cli, make_daemon: Make) -> None:
    daemon = make_daemon(arena_bytes=64 * MiB)
    data = os.urandom(2 * MiB)
    cli("put", "--durable", "bad", stdin=data, environ=at(daemon))
    cli("put", "--durable", "good", stdin=b"good", environ=at(daemon))
    running = cli("fsck", daemon.ssd_path)
    assert running.code == 1
    assert str(daemon.pid) in running.err
    daemon.stop()
    clean = cli("fsck", daemon.ssd_path, "--json")
    assert (clean.code, clean.document["corrupt"], clean.document["ok"]) == (0, 0, 4)
    flip_on_disk(daemon.ssd_path, data[MiB + 4096 : MiB + 8192])
    damaged = cli("fsck", daemon.ssd_path, "--json")
    assert (damaged.code, damaged.document["corrupt"], damaged.document["ok"]) == (7, 1, 3)
    daemon.start()
    result = cli("get", "bad", "out", environ=at(daemon))
    assert result.code == 7
    assert "damaged" in result.err
    assert cli("put", "bad", "--durable", stdin=data, environ=at(daemon)).code == 0, (
        "what was quarantined can be stored"
    )
    assert cli("get", "bad", environ=at(daemon)).out == data
    assert cli("get", "good", environ=at(daemon)).out == b"good"
    daemon.stop()
    cli("fsck", daemon.ssd_path, "--repair")
    assert cli("fsck", daemon.ssd_path).code == 0


def test_a_second_daemon_on_the_folder_or_the_socket_is_refused(cli: Cli, make_daemon: Make) -> None:
    first = make_daemon(arena_bytes=64 * MiB)
    second = make_daemon(start=False, settings={"ssd.path": 1})
    second.config_path.write_text(second.config_path.read_text().replace("ssd.path = 1\n", ""))
    text = second.config_path.read_text()
    second.config_path.write_text(text.replace(str(second.ssd_path), str(first.ssd_path)))
    folder = cli("serve", "--config", second.config_path)
    assert folder.code == 1
    assert str(first.ssd_path) in folder.err.splitlines()[-1]
    assert str(first.pid) in folder.err.splitlines()[-1]
    second.config_path.write_text(text.replace(str(second.socket_path), str(first.socket_path)))
    same_socket = cli("serve", "--config", second.config_path)
    assert same_socket.code == 1
    assert f"a daemon is serving on {first.socket_path} already" in same_socket.err
    assert cli("ping", environ=at(first)).code == 0


def test_reload_applies_what_it_can_and_keeps_the_old_on_an_error(cli: Cli, make_daemon: Make) -> None:
    """Fault 62: an operator's typing error must not cost the cache."""
    daemon = make_daemon(arena_bytes=64 * MiB)
    good = daemon.config_path.read_text()
    daemon.config_path.write_text(good.replace("arena.size", "arena.sise"))
    refused = cli("reload", environ=at(daemon))
    assert refused.code == 2
    assert "did you mean 'arena.size'?" in refused.err
    daemon.process and daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "reload refused, the old settings stay" in daemon.log_tail())
    assert cli("ping", environ=at(daemon)).code == 0

    daemon.config_path.write_text(good.replace(f"arena.size = {64 * MiB}", "arena.size = '128MiB'") + "lease.ttl = 7\n")
    document = cli("reload", "--json", environ=at(daemon)).document
    assert (document["changed"], document["needs_restart"]) == (["lease.ttl"], ["arena.size"])
    assert cli("reload", environ=at(daemon)).text.startswith("nothing that a reload can change is different")
    running = cli("config", "show", "--running", "--json", environ=at(daemon)).document["settings"]
    assert (running["lease.ttl"], running["arena.size"]) == (7, str(64 * MiB))


@contextmanager
def notify_socket(path: Path) -> Iterator[Callable[[], list[str]]]:
    """A datagram socket as systemd's; calling what is yielded returns the messages since the last call."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.setblocking(False)

        def take() -> list[str]:
            messages = []
            while True:
                try:
                    messages.append(receiver.recv(65536).decode())
                except BlockingIOError:
                    return messages

        yield take


def test_systemd_hears_ready_reloading_and_stopping(make_daemon: Make, tmp_path: Path) -> None:
    daemon = make_daemon(start=False)
    os.environ["NOTIFY_SOCKET"] = str(tmp_path / "n")
    try:
        with notify_socket(tmp_path / "n") as take:
            daemon.start()
            heard: list[str] = []
            wait_for(lambda: heard.extend(take()) or any("READY=1" in m for m in heard))
            assert any(m.startswith("STATUS=filling the arena: ") and "EXTEND_TIMEOUT_USEC=" in m for m in heard)
            ready = next(m for m in heard if "READY=1" in m)
            assert f"STATUS=serving on {daemon.socket_path}, arena 256 MiB" in ready
            heard.clear()
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGHUP)
            wait_for(lambda: heard.extend(take()) or any("READY=1" in m for m in heard))
            assert heard[0].startswith("RELOADING=1\nMONOTONIC_USEC=")
            assert daemon.stop() == 0
            assert any(m.startswith("STOPPING=1\n") for m in take())
    finally:
        del os.environ["NOTIFY_SOCKET"]


def test_sigterm_under_load_drains_within_its_deadline(cli: Cli, make_daemon: Make) -> None:
    """Fault 10. A client keeps storing while the daemon is told to stop."""
    daemon = make_daemon(settings={"shutdown.timeout": 5})
    data = os.urandom(64 * MiB)
    (daemon.folder / "in").write_bytes(data)
    environ = {**os.environ, **at(daemon), "KVSTORE_CONFIG": "/dev/null"}
    words = [KVSTORE, "put", "a", str(daemon.folder / "in")]
    with subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as writer:
        time.sleep(0.5)
        start_s = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - start_s < 8
        assert writer.wait(30) in (0, 1, 3)
    assert "stopped" in daemon.log_tail()
    assert cli("fsck", daemon.ssd_path).code == 0


def test_an_ssd_folder_that_cannot_be_written_costs_its_own_chunks_only(cli: Cli, make_daemon: Make) -> None:
    """One disk was full, or mounted read-only, at boot: the daemon did not start at all, and DRAM and the other volumes
    were lost with it."""
    daemon = make_daemon(start=False)
    daemon.ssd_path.mkdir()
    daemon.config_path.write_text(daemon.config_path.read_text().replace(str(daemon.ssd_path), "/sys/kernel"))
    daemon.start()
    assert cli("put", "name", stdin=b"in DRAM", environ=at(daemon)).code == 0
    status = cli("status", environ=at(daemon))
    assert status.code == 5
    assert "SSD volume /sys/kernel is left out: " in status.text


def _mount_small_disk(daemon: DaemonProcess, size_bytes: int, options: str) -> None:
    """An ext4 of its own under the volume's folder; skips where this machine cannot. The caller unmounts."""
    daemon.ssd_path.mkdir()
    image = daemon.folder / "image"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    for words in (["mkfs.ext4", "-q", image], ["mount", "-o", options, image, daemon.ssd_path]):
        if shutil.which(words[0]) is None or subprocess.run(words, capture_output=True).returncode:
            pytest.skip(f"{words[0]} does not work here")


@pytest.mark.root("it mounts a file system")
def test_a_disk_smaller_than_the_cap_recycles_its_segments(cli: Cli, make_daemon: Make) -> None:
    """Fault 11: 300 MiB of disk under a cap of 10 GiB. The first segment that could not be allocated was tried again
    for every later store: nothing went to SSD any more, nothing was recycled, and the status said ok."""
    daemon = make_daemon(start=False, arena_bytes=64 * MiB, ssd_bytes=10 << 30)
    _mount_small_disk(daemon, 300 * MiB, "loop")
    try:
        daemon.start()
        for number in range(12):
            name, content = f"file-{number}", bytes([number]) * (40 * MiB)
            assert cli("put", "--durable", name, stdin=content, environ=at(daemon)).code == 0, number
        got = cli("get", "file-11", environ=at(daemon))
        assert (got.code, got.out == content) == (0, True)
    finally:
        daemon.close()
        subprocess.run(["umount", "-l", str(daemon.ssd_path)], check=True)


def test_a_folder_deleted_under_the_daemon_is_said_and_not_written_to(cli: Cli, make_daemon: Make) -> None:
    """Fault 24: somebody removed the data directory. Writes into the deleted files succeeded, durable stores were
    acknowledged as on SSD, and the status said ok until the restart that found nothing."""
    daemon = make_daemon()
    assert cli("put", "--durable", "before", stdin=b"before", environ=at(daemon)).code == 0
    shutil.rmtree(daemon.ssd_path)
    wait_for(lambda: cli("status", environ=at(daemon)).code == 5)
    assert "was deleted or replaced while in use" in cli("status", environ=at(daemon)).text
    assert "in memory only" in cli("put", "--durable", "after", stdin=b"after", environ=at(daemon)).text
    assert cli("get", "before", environ=at(daemon)).code == 0


@pytest.mark.root("it mounts a file system")
def test_a_volume_that_turns_read_only_is_degraded_and_goes_on_serving(cli: Cli, make_daemon: Make) -> None:
    """Fault 22: EROFS in the middle of a run. ext4's `abort` does what the kernel does after an error of the device."""
    daemon = make_daemon(start=False, arena_bytes=32 * MiB, ssd_bytes=128 * MiB)
    _mount_small_disk(daemon, 256 * MiB, "loop,errors=remount-ro")
    try:
        daemon.start()
        assert cli("put", "--durable", "before", stdin=b"before", environ=at(daemon)).code == 0
        if subprocess.run(["mount", "-o", "remount,abort", str(daemon.ssd_path)], capture_output=True).returncode:
            pytest.skip("this kernel cannot abort a mounted ext4")
        cli("put", "after", stdin=os.urandom(MiB), environ=at(daemon))
        wait_for(lambda: cli("status", environ=at(daemon)).code == 5)
        assert f"SSD volume {daemon.ssd_path} is read-only" in cli("status", environ=at(daemon)).text
        assert cli("get", "before", environ=at(daemon)).out == b"before"
        assert cli("get", "after", environ=at(daemon)).code == 0
    finally:
        daemon.kill()
        subprocess.run(["umount", str(daemon.ssd_path)], check=True)


def test_no_configuration_at_all(cli: Cli, tmp_path: Path) -> None:
    """Sockets and volume go where XDG says; only the sizes are given, to spare the machine that runs the tests."""
    environ = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "KVSTORE_CONFIG": "/dev/null",
        "XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"),
        "KVSTORE_ARENA_SIZE": "64MiB", "KVSTORE_SSD_SIZE": "256MiB",
    }  # fmt: skip
    log = (tmp_path / "log").open("wb")
    with log, subprocess.Popen([KVSTORE, "serve"], env=environ, stdout=log, stderr=log) as process:
        try:
            wait_for(lambda: cli("ping", environ=environ).code == 0)
            assert (tmp_path / "kvstore").stat().st_mode & 0o777 == 0o700
            assert cli("put", "a", stdin=b"a", environ=environ).code == 0
            assert (tmp_path / "state" / "kvstore" / "ssd" / "VOLUME").exists()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.root("it becomes another user")
def test_an_ordinary_user_without_any_folder(cli: Cli) -> None:
    """No XDG_RUNTIME_DIR and no home: a private folder under the temporary directory, and the log says so."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    # Reading is allowed everywhere, for Python may lie in a home folder; connecting to a socket needs more than that.
    drop = ["setpriv", "--clear-groups", "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    clean = ["env", "-i", f"PATH={os.environ['PATH']}", "KVSTORE_CONFIG=/dev/null"]
    become = [*drop, "--reuid=65534", "--regid=65534", *clean]
    if subprocess.run([*become, KVSTORE, "version"], capture_output=True).returncode:
        pytest.skip("another user cannot run this environment's Python")
    sockets, state = Path("/tmp/kvstore-65534"), Path("/var/tmp/kvstore-65534")
    if sockets.exists() or state.exists():
        pytest.skip(f"{sockets} or {state} exists already")
    words = [*become, "HOME=/nonexistent", "KVSTORE_ARENA_SIZE=64MiB", "KVSTORE_SSD_SIZE=256MiB", KVSTORE, "serve"]
    try:
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                wait_for(lambda: (sockets / "kvstore.sock").exists())
                assert [sockets.stat().st_mode & 0o777, sockets.stat().st_uid] == [0o700, 65534]
                as_user = subprocess.run([*become, KVSTORE, "status"], capture_output=True, text=True)
                assert as_user.returncode == 0, as_user.stderr
                assert f"on {sockets}/kvstore.sock: ok" in as_user.stdout
                stranger = ["setpriv", "--reuid=65533", "--regid=65533", "--clear-groups", KVSTORE]
                refused = subprocess.run(
                    [*stranger, "status", "--socket", str(sockets / "kvstore.sock")], capture_output=True
                )
                assert refused.returncode == 6
                assert b"no permission" in refused.stderr
            finally:
                process.terminate()
                out = process.communicate(timeout=20)[0].decode()
        assert process.returncode == 0
        assert "only this user can connect: the sockets are in a private folder folder=/tmp/kvstore-65534" in out
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
        shutil.rmtree(state, ignore_errors=True)


@pytest.mark.root("it makes a memory cgroup")
def test_a_cgroup_tighter_than_the_arena_is_said_and_not_killed(tmp_path: Path) -> None:
    """Fault 57: without the check, the out-of-memory killer ends the daemon while it pages the arena in."""
    for top, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = top / f"kvstore-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(256 * MiB))
            break
        except OSError:
            if group.exists():
                group.rmdir()
    else:
        pytest.skip("no memory cgroup can be made here")
    enter = f"echo $$ > {group}/cgroup.procs && exec {KVSTORE} serve --ssd-paths none --arena-size"
    environ = {"PATH": os.environ["PATH"], "KVSTORE_CONFIG": "/dev/null", "XDG_RUNTIME_DIR": str(tmp_path)}
    try:
        done = subprocess.run(["sh", "-c", f"{enter} 512MiB"], env=environ, capture_output=True, text=True, timeout=30)
        assert done.returncode == 2
        assert "512 MiB for the arena and 128 MiB for the daemon are more than the" in done.stderr
        assert f"that cgroup {str(group).removeprefix('/sys/fs/cgroup')} has free" in done.stderr
        with subprocess.Popen(["sh", "-c", f"{enter} 30%"], env=environ, stderr=subprocess.DEVNULL) as process:
            try:
                wait_for(lambda: (tmp_path / "kvstore" / "kvstore.sock").exists())
            finally:
                process.terminate()
                assert process.wait(20) == 0
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
