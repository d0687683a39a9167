"""What vLLM's plugin system calls in each of its processes, perhaps more than once. Imports nothing heavy itself."""

from __future__ import annotations

CONNECTOR = "KVStoreConnector"


def register() -> None:
    """Make the connector known by its bare name. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kvstore.connectors.vllm.connector", CONNECTOR)
