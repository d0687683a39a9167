"""fio as the measure of what the device gives: direct io_uring on a written file, huge-page buffers where reserved.

fio's default buffers are a false ceiling (about half), and so is its re-used random data: hence the flags.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from bench.memory import Bytes, copy_s
from kvstore.units import GiB, MiB

DEPTHS = (1, 4, 16)
JOBS = (1, 2, 4)
BLOCK_BYTES = 8 * MiB
BUFFER_BYTES = (max(DEPTHS) * BLOCK_BYTES + 32 * MiB) * max(JOBS)
"""Reserve this much in huge pages: the most that a run holds in buffers, and some to spare."""
TRIES = 3
"""A run whose buffers find no huge page (another process was faster) is killed by SIGBUS, and tried again."""
_STEP_BYTES = 8 * MiB


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of running fio, and what it gave when it was chosen."""

    verb: str
    depth: int
    jobs: int
    bytes_per_s: float

    def __str__(self) -> str:
        return f"{self.verb} depth {self.depth}, {self.jobs} jobs: {self.bytes_per_s / 1e9:.2f} GB/s"


def require_fio() -> None:
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed. On Debian: apt-get install fio")


class Fio:
    def __init__(self, folder: Path, huge: bool, size_bytes: int = GiB) -> None:
        """Writes a file of `size_bytes` in `folder`, so that no run meets unwritten extents."""
        self._file = folder / "fio.dat"
        self._huge = huge
        self._size_bytes = size_bytes
        self.run("write", 4, 1)

    def best(self, verb: str, say: Callable[[str], None], twice: bool) -> Setting:
        """The fastest of all depths and jobs; with `twice` the three fastest are run again, against flukes."""
        found = [Setting(verb, depth, jobs, self.run(verb, depth, jobs)) for depth in DEPTHS for jobs in JOBS]
        found.sort(key=lambda setting: setting.bytes_per_s, reverse=True)
        if twice:
            again = [Setting(verb, s.depth, s.jobs, (s.bytes_per_s + self.again(s)) / 2) for s in found[:3]]
            found = sorted(again, key=lambda setting: setting.bytes_per_s, reverse=True)
        say(f"fio's best {found[0]}")
        return found[0]

    def again(self, setting: Setting) -> float:
        """Bytes a second of another run."""
        return self.run(setting.verb, setting.depth, setting.jobs)

    def beside(self, setting: Setting, target: Bytes, source: Bytes) -> float:
        """Bytes a second of a run with one copy and one xxh3 of the same bytes beside it, at fio's own pace."""
        return self._measure(setting.verb, setting.depth, setting.jobs, (target, source))

    def run(self, verb: str, depth: int, jobs: int) -> float:
        """Bytes a second."""
        return self._measure(verb, depth, jobs, None)

    def _measure(self, verb: str, depth: int, jobs: int, beside: tuple[Bytes, Bytes] | None) -> float:
        for _ in range(TRIES):
            process = self._start(verb, depth, jobs)
            if beside is not None:
                worker = threading.Thread(target=_copy_and_hash, args=(process.pid, self._size_bytes, *beside))
                worker.start()
            out, errors = process.communicate()
            if beside is not None:
                worker.join()
            if process.returncode == 0:
                job = json.loads(out[out.index("{") :])["jobs"][0]
                return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])
            if process.returncode > 0:
                raise SystemExit(f"fio ended with {process.returncode}: {errors or out}")
        raise SystemExit("fio was killed three times: does another process take the huge pages that were reserved?")

    def _start(self, verb: str, depth: int, jobs: int) -> subprocess.Popen[str]:
        share = self._size_bytes // jobs // BLOCK_BYTES * BLOCK_BYTES
        command = [
            "fio", "--name=reference", f"--filename={self._file}", f"--rw={verb}", f"--bs={BLOCK_BYTES}",
            f"--size={share}", f"--offset_increment={share}", f"--numjobs={jobs}", f"--iodepth={depth}",
            "--thread", "--group_reporting", "--ioengine=io_uring", "--direct=1", "--randrepeat=0", "--norandommap",
            "--overwrite=1", f"--iomem={'mmaphuge' if self._huge else 'mmap'}", "--output-format=json",
        ]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _copy_and_hash(pid: int, size_bytes: int, target: Bytes, source: Bytes) -> None:
    """Copy and hash as many bytes as process `pid` has moved to or from the device, until it ends."""
    counters = Path(f"/proc/{pid}/io")
    done, span = 0, len(source) - _STEP_BYTES
    while done < size_bytes:
        try:
            counts = dict(line.split(": ") for line in counters.read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):
            return
        moved = max(int(counts["read_bytes"]), int(counts["write_bytes"]))
        while done < min(moved, size_bytes):
            at = done % span // _STEP_BYTES * _STEP_BYTES
            copy_s([target[at : at + _STEP_BYTES]], [source[at : at + _STEP_BYTES]])
            xxhash.xxh3_128_digest(target[at : at + _STEP_BYTES].data)
            done += _STEP_BYTES
        time.sleep(0.001)
