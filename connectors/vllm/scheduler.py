"""The scheduler's half: what to load for whom, what to save, and which blocks are held meanwhile.

All methods are called by the engine's scheduling thread, in the order of vLLM's hooks of the same names; `request` is
vLLM's Request. Nothing here waits for the daemon longer than `asking.STEP_WAIT_S` a step.

What is saved was computed in steps whose results the engine has processed: a failed load of any connector has taken
the count of computed tokens down by then, so no block is saved that holds, or was computed from, bytes that never came.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvstore.client import Client
from kvstore.connectors.guard import Guard
from kvstore.connectors.vllm.asking import Asker
from kvstore.connectors.vllm.holds import Holds
from kvstore.connectors.vllm.options import Options, request_options
from kvstore.connectors.vllm.plan import ChunkBlocks, chunk_keys, parent_key, plan_load, plan_save, whole_chunks
from kvstore.connectors.vllm.requests import Known
from kvstore.connectors.vllm.work import LoadJob, SaveJob, Setting, Work
from kvstore.errors import Invalid

_log = logging.getLogger("vllm.kvstore.scheduler")
EPOCH_BYTES = 16
UNREADY_S = 0.5
"""So long a worker's word that it does not reach the daemon counts: an idle engine steps, and so speaks, no more."""


class Scheduler:
    def __init__(self, client: Client, options: Options, setting: Callable[[], Setting], ranks: int) -> None:
        """setting: made at the first request, when vLLM knows its hash seed; ranks: acknowledgements a save needs."""
        self._client = client
        self._options = options
        self._make_setting = setting
        self._setting: Setting | None = None
        self._asker = Asker(time.monotonic, options.lookup_timeout_s)
        self._known: dict[str, Known] = {}
        self._loads: list[LoadJob] = []
        self._holds = Holds(ranks, options.held_share)
        self._epoch = ""
        self._void_loads = False
        self._unready_until_s = 0.0
        self.guard = Guard(_log)
        self.counts: Counter[str] = Counter()
        """What happened since the last time that they were taken."""

    def bind_pool(self, pool: Any) -> None:
        """pool: vLLM's BlockPool."""
        self._holds.pool = pool

    def on_new_request(self, request: Any) -> None:
        if self._setting is None:
            self._setting = self._make_setting()
        try:
            off = request_options(request.kv_transfer_params).off
        except Invalid as error:
            _log.warning("request %s: %s; it is neither looked up nor stored", request.request_id, error)
            off = True
        reasons = {
            "off": off,
            "prompt_embeds": getattr(request, "prompt_embeds", None) is not None,
            "multimodal": bool(getattr(request, "mm_features", None)),
            "lora": request.lora_request is not None,
            "resumable": bool(getattr(request, "resumable", False)),
        }
        for reason in (name for name, present in reasons.items() if present):
            self.counts[f"requests_not_served_{reason}"] += 1
        served = not any(reasons.values())
        skips = bool(getattr(request, "skip_reading_prefix_cache", False))
        self._known[request.request_id] = Known(
            request,
            request.cache_salt,
            self._epoch,
            loads=served and self._options.load and not skips,
            saves=served and self._options.save,
        )

    def matched(self, request: Any, local_tokens: int) -> int | None:
        """How many tokens from local_tokens on can be loaded; None: ask again in the next step."""
        known = self._known.get(request.request_id)
        if known is None or not known.may_load(request.num_preemptions) or time.monotonic() < self._unready_until_s:
            return 0
        assert self._setting is not None
        geometry = self._setting.geometry
        known.local_tokens = local_tokens
        first = local_tokens // geometry.chunk_tokens
        if known.answer is not None and (known.answer.first_chunk > first or not self._asker.fresh(known.answer)):
            known.release()
        if known.answer is None:
            if known.inquiry is None:
                end = whole_chunks(geometry, request.num_tokens, len(request.block_hashes))
                if end <= first:
                    return 0
                namespace, identity = self._setting.namespace, known.identity
                keys = chunk_keys(geometry, request.block_hashes, first, end)
                self.counts["lookups"] += 1
                known.inquiry = self._asker.ask(lambda: self._client.root(namespace, identity), first, keys)
            answer = self._asker.poll(known.inquiry)
            if answer is None:
                return None
            known.inquiry = None
            if isinstance(answer, bool):
                self.counts["lookups_too_slow"] += 1
                known.tried = request.num_preemptions
                return 0
            known.answer = answer
        end_tokens = (known.answer.first_chunk + known.answer.chunks) * geometry.chunk_tokens
        if end_tokens <= local_tokens:
            known.tried = request.num_preemptions
            known.release()
            return 0
        return end_tokens - local_tokens

    def allocated(self, request: Any, table: Sequence[int], tokens: int) -> None:
        """Blocks were given for `tokens` tokens after the local ones: 0 where another connector, or nobody, loads."""
        known = self._known.get(request.request_id)
        if known is None or known.loading or self._setting is None:
            return
        if not tokens:
            known.release()
            return
        geometry = self._setting.geometry

        def plan() -> LoadJob:
            assert known.answer is not None, "blocks were given for what was not promised"
            pieces = plan_load(geometry, table, known.local_tokens, tokens)
            keys = chunk_keys(geometry, request.block_hashes, pieces[0].chunk, pieces[-1].chunk + 1)
            return LoadJob(request.request_id, known.identity, keys, pieces)

        # The engine waits for a report now, whatever happens here: a job without keys fails, and is reported.
        blocks = tuple(table[known.local_tokens // geometry.block_tokens :])
        hopeless = LoadJob(request.request_id, known.identity, (), (ChunkBlocks(0, 0, blocks),))
        job = self.guard.run("plan of a load", hopeless, plan)
        self._loads.append(job)
        known.tried = request.num_preemptions
        known.loading = job
        self.counts["load_requests"] += 1
        self.counts["load_tokens"] += tokens

    def resident_share(self, request: Any) -> float:
        """Of the chunks that this request is being loaded from, how many were in DRAM when asked for."""
        known = self._known.get(request.request_id)
        if known is None or known.answer is None or not known.answer.chunks:
            return 1.0
        return known.answer.resident / known.answer.chunks

    def work(self, scheduled: Iterable[str], tables: Callable[[str], Sequence[int]], preempted: Iterable[str]) -> Work:
        """The step's jobs. scheduled: its requests; tables: a scheduled request's whole block table."""
        self._asker.new_step()
        for request_id in preempted:
            if request_id in self._known:
                self._known[request_id].first_computed = None
        for request_id in scheduled:
            known = self._known.get(request_id)
            if known is not None and known.saves:
                self.guard.run("plan of a save", 0, partial(self._save, known, partial(tables, request_id)))
                if known.first_computed is None:
                    known.first_computed = known.request.num_computed_tokens
        loads, self._loads = tuple(self._loads), []
        saves = self._holds.take_jobs()
        void, self._void_loads = self._void_loads, False
        return Work(self._setting if loads or saves else None, loads, saves, void)

    def ended(self, request: Any, table: Sequence[int]) -> None:
        """The request is finished or aborted; its blocks are freed after this."""
        known = self._known.pop(request.request_id, None)
        if known is None:
            return
        if known.inquiry is not None:
            self._asker.drop(known.inquiry)
        known.release()
        if known.saves and known.loading is None:
            left = self.guard.run("plan of a save", 0, lambda: self._save(known, lambda: table))
            if left:
                self.counts["saves_dropped"] += left

    def processed(
        self, loaded: Collection[str], bad_blocks: Collection[int], saved: Mapping[int, int], ready: bool
    ) -> None:
        """What the workers reported. saved: save jobs, and how many ranks ended them; ready: all reach the daemon."""
        self._unready_until_s = 0.0 if ready else time.monotonic() + UNREADY_S
        if bad_blocks:
            self._note_failures(bad_blocks)
        for request_id in loaded:
            known = self._known.get(request_id)  # gone where the request was aborted meanwhile
            if known is not None:
                self._loaded(known)
        self._holds.acknowledge(saved)

    @property
    def busy(self) -> bool:
        """Whether blocks are held: the engine must go on stepping, so that they are freed."""
        return self._holds.busy

    def reset(self) -> None:
        """The weights may be others now: nothing stored before is found again, no request of before stores anything."""
        self._epoch = secrets.token_hex(EPOCH_BYTES)
        self._void_loads = True
        for known in self._known.values():
            if known.inquiry is not None:
                self._asker.drop(known.inquiry)
                known.inquiry = None
            if known.loading is None:
                known.release()
            known.loads = known.saves = False
        self.counts["epochs"] += 1

    def take_counts(self) -> Counter[str]:
        counts, self.counts = self.counts, Counter()
        return counts

    def close(self) -> None:
        """Idempotent."""
        for known in self._known.values():
            known.release()
        self._known.clear()
        self._asker.close()
        self._client.close()

    def _note_failures(self, bad_blocks: Collection[int]) -> None:
        for request_id, known in self._known.items():
            if known.loading is not None and not known.failed and not known.loading.blocks.isdisjoint(bad_blocks):
                known.failed = True
                self.counts["load_requests_failed"] += 1
                _log.info("request %s: a load failed, the engine computes instead", request_id)

    def _loaded(self, known: Known) -> None:
        job, known.loading = known.loading, None
        known.release()
        if job is not None and not known.failed and self._setting is not None:
            last = job.pieces[-1]
            whole = last.first + len(last.blocks) == self._setting.geometry.blocks_per_chunk
            known.saved_chunks = max(known.saved_chunks, last.chunk + whole)  # stored, and so were its ancestors

    def _save(self, known: Known, table: Callable[[], Sequence[int]]) -> int:
        """Hold the blocks of the chunks that have become whole; returns how many chunks had to wait."""
        request, setting = known.request, self._setting
        assert setting is not None
        confirmed = request.num_computed_tokens - request.num_in_flight_tokens
        if known.first_computed is None or confirmed <= known.first_computed:
            return 0
        end = whole_chunks(setting.geometry, confirmed, len(request.block_hashes))
        if end <= known.saved_chunks:
            return 0
        end, wanted = (
            known.saved_chunks + self._holds.room_chunks(setting.geometry.blocks_per_chunk, end - known.saved_chunks),
            end,
        )
        if end > known.saved_chunks:
            pieces = plan_save(setting.geometry, table(), known.saved_chunks, end)
            keys = chunk_keys(setting.geometry, request.block_hashes, known.saved_chunks, end)
            parents = (parent_key(setting.geometry, request.block_hashes, known.saved_chunks), *keys[:-1])
            self._holds.add(lambda number: SaveJob(number, known.identity, keys, parents, pieces))
            self.counts["save_chunks"] += len(keys)
            known.saved_chunks = end
        return wanted - end
