"""What users set: `kv_connector_extra_config` for the engine, `kv_transfer_params` for a request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvstore.errors import Invalid

PARAMETERS = "kvstore"
"""Our key in a request's kv_transfer_params, beside those of other connectors."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one engine."""

    socket_path: str | None = None
    """The daemon's socket; None: the default place."""
    chunk_tokens: int | None = None
    """Tokens of a chunk, a multiple of the engine's block; None: the fewest that reach 1 MiB a rank, at most 256."""
    weights_revision: str | None = None
    """Vouches for the weights instead of a hash over them: change it whenever they change."""
    load: bool = True
    save: bool = True
    layerwise: bool = False
    lookup_timeout_s: float = 0.02
    """An answer that takes longer is a miss: by then the engine could have computed a good part itself."""
    held_share: float = 0.1
    """Most of the engine's blocks that may wait to be saved; beyond that saves wait, at a request's end they drop."""


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one request: `{"kvstore": {"off": true}}`."""

    off: bool = False
    """Neither look up nor store."""


def engine_options(extra: Mapping[str, Any]) -> Options:
    """Raises Invalid naming what is wrong."""
    try:
        options = msgspec.convert(dict(extra), Options)
    except msgspec.ValidationError as error:
        raise Invalid(
            f"kv_connector_extra_config: {error}; known are {', '.join(Options.__struct_fields__)}"
        ) from error
    if not 0 < options.lookup_timeout_s <= 10:
        raise Invalid(
            f"kv_connector_extra_config: lookup_timeout_s is above 0 and at most 10, not {options.lookup_timeout_s}"
        )
    if not 0 < options.held_share <= 0.5:
        raise Invalid(f"kv_connector_extra_config: held_share is above 0 and at most 0.5, not {options.held_share}")
    return options


def request_options(parameters: Mapping[str, Any] | None) -> RequestOptions:
    """Raises Invalid where our part of a request's parameters is not understood."""
    try:
        return msgspec.convert((parameters or {}).get(PARAMETERS) or {}, RequestOptions)
    except msgspec.ValidationError as error:
        raise Invalid(f"kv_transfer_params[{PARAMETERS!r}]: {error}") from error
