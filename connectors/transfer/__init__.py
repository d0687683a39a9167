"""Copies between an engine's paged KV cache and slots of the arena."""

from kvstore.connectors.transfer.copier import Copier
from kvstore.connectors.transfer.host import HostCopier
from kvstore.connectors.transfer.pages import LayerPages, layer_pages

__all__ = ["Copier", "HostCopier", "LayerPages", "layer_pages"]
