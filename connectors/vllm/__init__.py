"""The connector for vLLM. Importing this needs neither vLLM nor torch; asking for `KVStoreConnector` does.

vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --kv-transfer-config '{"kv_connector": "KVStoreConnector",
    "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.connectors.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreConnector":
        from kvstore.connectors.vllm.connector import KVStoreConnector

        return KVStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
