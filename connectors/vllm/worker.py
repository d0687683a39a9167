"""The worker's half: hands the step's jobs to transfer threads, and reports what has ended.

One rank. Hooks run on the engine's thread and neither wait nor call the daemon; jobs run on two threads of our own, so
that saves never stand before loads.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from kvstore.client import Client
from kvstore.client.root import Root
from kvstore.connectors.guard import Guard
from kvstore.connectors.transfer import Copier
from kvstore.connectors.vllm import moving
from kvstore.connectors.vllm.work import LoadJob, SaveJob, Setting, Work
from kvstore.errors import Invalid
from kvstore.namespace import RequestIdentity

_log = logging.getLogger("vllm.kvstore.worker")


class Worker:
    """Hooks are called by one thread."""

    def __init__(self, client: Client, rank: int, replicas: int) -> None:
        """replicas: consecutive ranks whose KV is the same; the first of them writes."""
        self._client = client
        self._shard = rank // replicas
        self._writes = rank % replicas == 0
        self._copier: Copier | None = None
        self._layers: tuple[str, ...] = ()
        self._setting: Setting | None = None
        """One object for equal ones: the client knows its roots by the namespace object."""
        self._loader = ThreadPoolExecutor(1, "kvstore-load")
        self._saver = ThreadPoolExecutor(1, "kvstore-save")
        self._lock = threading.Lock()  # guards all below
        self._loading: set[str] = set()
        self._aborted: set[str] = set()
        """Nobody wants their bytes any more; their blocks are free as soon as they are reported."""
        self._voided: set[str] = set()
        """Their bytes may be those of other weights: they fail, even if they were loaded well."""
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._bad_reported: set[int] = set()
        self._saved: list[int] = []
        self._counts: Counter[str] = Counter()
        self.guard = Guard(_log)

    def register(self, layers: Iterable[str], copier: Copier) -> None:
        """The cache exists now: `copier` copies the named layers, in this order."""
        self._layers = tuple(layers)
        self._copier = copier

    def submit(self, work: Work) -> None:
        """Hand over the jobs of a step. Their blocks stay as they are until they are reported."""
        if work.setting is not None and work.setting != self._setting:
            self._setting = work.setting
        if work.void_loads:
            with self._lock:
                self._voided |= self._loading
        for load in work.loads:
            with self._lock:
                self._loading.add(load.request_id)
            mark = self._mark()
            self._loader.submit(self._load, self._setting, load, mark)
        for save in work.saves:
            mark = self._mark()
            self._saver.submit(self._save, self._setting, save, mark)

    @property
    def ready(self) -> bool:
        """Whether a load has a chance now."""
        return self._client.connected and self._client.breaker_state == "closed"

    def stop(self, request_ids: Iterable[str]) -> None:
        """These requests have ended: what is left of their loads is not needed, only the report."""
        with self._lock:
            self._aborted |= self._loading.intersection(request_ids)

    def take_loaded(self) -> set[str]:
        """Requests whose loads ended since the last call, each once. Their bad blocks are in `take_bad_blocks` next."""
        with self._lock:
            loaded, self._loaded = self._loaded, set()
            self._bad_reported |= self._bad_blocks
            self._bad_blocks = set()
        return loaded

    def take_bad_blocks(self) -> set[int]:
        """Blocks of the requests named by `take_loaded` that do not hold their KV."""
        bad, self._bad_reported = self._bad_reported, set()
        return bad

    def take_saved(self) -> list[int]:
        """Numbers of the save jobs that ended since the last call: their blocks are not read any more."""
        with self._lock:
            saved, self._saved = self._saved, []
        return saved

    def take_counts(self) -> Mapping[str, int]:
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        """Waits for the job under way; those in the queue are dropped. Idempotent."""
        with self._lock:
            self._aborted |= self._loading
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._saver.shutdown(wait=True, cancel_futures=True)
        if self._copier is not None:
            self._copier.close()
        self._client.close()

    def _mark(self) -> object:
        return self._copier.mark() if self._copier is not None else None

    def _load(self, setting: Setting | None, job: LoadJob, mark: object) -> None:
        counts: Counter[str] = Counter()

        def run() -> set[int]:
            copier = self._fitting_copier(setting)
            root = self._root(setting, job.identity)
            return moving.load(root, copier, job, mark, self._shard, lambda: self._is_stopped(job), counts)

        bad = self.guard.run("load", job.blocks, run)
        with self._lock:
            if job.request_id in self._voided:
                bad = job.blocks
            if job.request_id in self._aborted:
                bad = set()
            self._voided.discard(job.request_id)
            self._aborted.discard(job.request_id)
            self._loading.discard(job.request_id)
            self._loaded.add(job.request_id)
            self._bad_blocks |= bad
            self._counts += counts

    def _save(self, setting: Setting | None, job: SaveJob, mark: object) -> None:
        counts: Counter[str] = Counter()

        def run() -> None:
            copier = self._fitting_copier(setting)
            moving.save(self._root(setting, job.identity), copier, job, mark, self._shard, counts)

        if self._writes:
            self.guard.run("save", None, run)
        with self._lock:
            self._saved.append(job.number)
            self._counts += counts

    def _is_stopped(self, job: LoadJob) -> bool:
        with self._lock:
            return job.request_id in self._aborted or job.request_id in self._voided

    def _root(self, setting: Setting | None, identity: RequestIdentity) -> Root:
        assert setting is not None, "jobs come with their setting"
        return self._client.root(setting.namespace, identity)

    def _fitting_copier(self, setting: Setting | None) -> Copier:
        """Raises Invalid where this rank's cache is not the one that the scheduler speaks of."""
        assert setting is not None, "jobs come with their setting"
        copier = self._copier
        if copier is None:
            raise Invalid("there is no KV cache yet")
        if self._layers != setting.layers or copier.page_bytes != setting.page_bytes:
            raise Invalid(
                f"this rank has {len(self._layers)} layers with pages of {copier.page_bytes} bytes, the scheduler "
                f"speaks of {len(setting.layers)} with {setting.page_bytes}"
            )
        return copier
