"""kvstore: a per-node daemon that keeps LLM KV cache in shared memory and on SSD.

We may lose any chunk at any time; we never serve bytes other than those stored under exactly that identity.
Start with `kvstore.client.Client` (batch_set, batch_get) and docs/architecture.md.
"""

__version__ = "0.1.0"
