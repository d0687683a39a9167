"""What operators see. Everything here is bounded, so that no answer holds the loop for long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore import __version__
from kvstore.errors import Invalid
from kvstore.index import READY, SICK, Root, Series
from kvstore.keys import KEY_BYTES

if TYPE_CHECKING:
    from kvstore.manager.manager import Manager

SCHEMA = 1
MOST_ROWS = 500
"""Rows of one `ls` answer."""


def status(manager: Manager) -> dict[str, Any]:
    """One screen: health, tiers, sessions, queues."""
    state, arena = manager.planner.state, manager.arena
    reasons = health_reasons(manager)
    columns = state.columns
    resident = int((columns.flags[: len(columns.keys)] & READY > 0).sum())
    return {
        "schema": SCHEMA,
        "version": __version__,
        "uptime_s": round(manager.clock.now() - manager.started_s, 1),
        "health": "degraded" if reasons else "ok",
        "reasons": reasons,
        "draining": manager.draining,
        "arena": {
            "size_bytes": arena.size_bytes,
            "used_bytes": state.dram.used_bytes,
            "page_kind": arena.page_kind,
            "notes": list(arena.notes),
        },
        "dram": {
            "chunks": resident,
            "bytes": state.dram.used_bytes - state.reserved_bytes,
            "reserved_bytes": state.reserved_bytes,
            "dirty_bytes": state.dirty_bytes,
            "pinned_bytes": state.pinned_bytes,
        },
        "ssd": [_volume(manager, number) for number in range(len(manager.volumes.all))],
        "sessions": [
            {
                "id": session.name.hex()[:8],
                "label": session.label,
                "connected": session.connected,
                "leases": len(session.leases),
                "reservations": len(session.reservations),
                "held_bytes": session.held_bytes,
            }
            for session in list(state.sessions.values())[:MOST_ROWS]
        ],
        "roots": len(state.roots),
        "chunks": len(columns),
        "queues": {"loads": manager.transfer.queued_loads, "stores": manager.transfer.queued_stores},
    }


def health_reasons(manager: Manager) -> list[str]:
    """Why the store is not in full health: one sentence each, empty when it is."""
    lost = [
        f"SSD volume {volume.path} is {state}"
        for volume, state in zip(manager.volumes.all, manager.volumes.states, strict=True)
        if state != "ok"
    ]
    return [*manager.left_out, *lost]


def stat(manager: Manager) -> dict[str, Any]:
    """All counters, {name: {label: value}}."""
    return {"schema": SCHEMA, "counters": manager.ledger.snapshot()}


def ls(manager: Manager, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Without `root`: the roots. With it: its chunks, from `cursor` on, at most `limit`."""
    if not arguments.get("root"):
        roots = sorted(manager.planner.state.roots.values(), key=_chunks, reverse=True)[:MOST_ROWS]
        total = len(manager.planner.state.roots)
        return {"schema": SCHEMA, "roots": [_root(root) for root in roots], "total": total}
    roots = roots_named(manager, arguments)
    if len(roots) != 1:
        raise Invalid(f"{len(roots)} roots begin with {arguments['root']!r}: give more digits of one of `kvstore ls`")
    cursor, limit = arguments.get("cursor") or 0, arguments.get("limit") or 100
    if not isinstance(cursor, int) or not isinstance(limit, int) or cursor < 0 or not 1 <= limit <= MOST_ROWS:
        raise Invalid(f"cursor must be a number from an earlier answer and limit 1 to {MOST_ROWS}")
    columns = manager.planner.state.columns
    mine = {series.number: series for series in roots[0].series.values()}
    chunks: list[dict[str, Any]] = []
    row = cursor
    end = min(len(columns.keys), cursor + 100 * MOST_ROWS)
    while row < end and len(chunks) < limit:
        series = mine.get(int(columns.series[row]))
        key = columns.keys[row]
        if series is not None and key is not None and series.rows.get(key) == row:
            chunks.append(_chunk(manager, series, row))
        row += 1
    return {"schema": SCHEMA, "chunks": chunks, "cursor": row if row < len(columns.keys) else None}


def inspect(manager: Manager, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Where a key is, under every root or one, and what happened to it lately."""
    key = hex_key(arguments)
    found = []
    for root in roots_named(manager, arguments):
        for series in root.series.values():
            row = series.rows.get(key)
            if row is not None:
                found.append({"root": root.digest.hex(), **_chunk(manager, series, row)})
            if len(found) >= MOST_ROWS:
                break
    now_s = manager.clock.now()
    events = [
        {
            "ago_s": round(now_s - event.at_s, 3),
            "what": event.what,
            "reason": event.reason,
            "tier": event.tier,
            "root": event.root.hex(),
        }
        for event in manager.ledger.events(key)
    ]
    return {"schema": SCHEMA, "key": key.hex(), "found": found, "events": events}


def hex_key(arguments: Mapping[str, Any]) -> bytes:
    """The `key` argument. Raises Invalid."""
    text = arguments.get("key")
    try:
        key = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise Invalid(f"key {text!r} is not {2 * KEY_BYTES} hex digits")
    return key


def roots_named(manager: Manager, arguments: Mapping[str, Any]) -> list[Root]:
    """Roots whose hex digest begins with the `root` argument; all of them without one."""
    prefix = str(arguments.get("root") or "").lower()
    roots = manager.planner.state.roots
    return [root for digest, root in roots.items() if digest.hex().startswith(prefix)]


def _chunks(root: Root) -> int:
    return sum(len(series.rows) for series in root.series.values())


def _root(root: Root) -> dict[str, Any]:
    description = msgspec.json.decode(root.description)
    model = description.get("namespace", {}).get("model", "")
    identity = {name: value for name, value in description.get("identity", {}).items() if value}
    return {"root": root.digest.hex(), "model": model, "chunks": _chunks(root), "description": {"identity": identity}}


def _chunk(manager: Manager, series: Series, row: int) -> dict[str, Any]:
    state = manager.planner.state
    columns = state.columns
    parent = int(columns.parent[row])
    tiers = [tier for tier, there in (("dram", columns.flags[row] & READY), ("ssd", columns.ssd[row] >= 0)) if there]
    return {
        "key": columns.key(row).hex(),
        "pool": series.pool,
        "tiers": tiers,
        "parent": columns.key(parent).hex() if parent >= 0 else None,
        "hidden": bool(columns.flags[row] & SICK) or row in series.orphans,
        "size_bytes": series.slot_bytes,
        "pins": int(columns.pins[row]),
        "busy": bool(columns.busy[row]),
    }


def _volume(manager: Manager, number: int) -> dict[str, Any]:
    volume, space = manager.volumes.all[number], manager.planner.state.ssd
    allocated, free = manager.volumes.spaces[number]
    chunks = sum(segment.used for segment in space.slabs[number].segments())
    return {
        "path": str(volume.path),
        "size_bytes": volume.size_bytes,
        "used_bytes": space.slabs[number].used_bytes,
        "allocated_bytes": allocated,
        "free_bytes": free,
        "chunks": chunks,
        "state": manager.volumes.states[number],
        "direct": volume.direct,
        "notes": list(volume.notes),
    }
