"""What is known of one request. Pure, apart from the lease it carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvstore.connectors.vllm.asking import Answer, Inquiry
from kvstore.connectors.vllm.identity import request_identity
from kvstore.connectors.vllm.work import LoadJob
from kvstore.namespace import RequestIdentity


@dataclass(slots=True)
class Known:
    request: Any
    """vLLM's own, which changes as the request goes on."""
    salt: str | None
    epoch: str
    loads: bool
    saves: bool
    inquiry: Inquiry | None = None
    answer: Answer | None = None
    local_tokens: int = 0
    """What the engine had itself when it asked last."""
    loading: LoadJob | None = None
    """Handed over and not yet reported: what its blocks hold is nobody's KV until then."""
    tried: int = -1
    """The request's count of preemptions when it was answered for good: it is asked about again and again."""
    failed: bool = False
    """A load failed once: this request computes."""
    saved_chunks: int = 0
    first_computed: int | None = None
    """The engine's count of computed tokens when it was first scheduled since it has its blocks; None before. Up to
    there the count may speak of a load, ours or another connector's, that has not ended or is about to fail. Once the
    engine has processed more than this, the step that such a load belonged to has been processed, and its failure with
    it."""
    identity: RequestIdentity = field(init=False)

    def __post_init__(self) -> None:
        self.identity = request_identity(self.salt, self.epoch)

    def may_load(self, preemptions: int) -> bool:
        return self.loads and not self.failed and self.loading is None and self.tried != preemptions

    def release(self) -> None:
        """Let go of the answer's chunks."""
        if self.answer is not None:
            self.answer.lease.release()
            self.answer = None
