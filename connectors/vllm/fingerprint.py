"""The weights fingerprint: SHA-256 over the content of every weight file and the settings beside them.

Headers, shapes and sizes are equal for every fine-tune of one base, so nothing less than the content will do. In a hub
snapshot a file is a link to a blob that is named by its SHA-256: that name is its hash, and nothing is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvstore.errors import Invalid

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
HASH_THREADS = 8
_BLOB = re.compile(r"[0-9a-f]{64}")


def folder_fingerprint(folder: Path) -> str:
    """Hex digest over name and content of every weight file in `folder` (its sub-folders too).

    Reads all of it, in parallel: seconds for what has just been loaded. Raises Invalid where there is none or one
    cannot be read.
    """
    try:
        files = sorted(path for path in folder.rglob("*") if path.suffix in WEIGHT_SUFFIXES and path.is_file())
        if not files:
            raise Invalid(f"no weights ({', '.join(WEIGHT_SUFFIXES)}) in {folder}; set weights_revision")
        with ThreadPoolExecutor(HASH_THREADS, "kvstore-fingerprint") as pool:
            hashes = list(pool.map(_file_hash, files))
    except OSError as error:
        raise Invalid(f"the weights in {folder} cannot be read ({error.strerror}); set weights_revision") from error
    named = [[path.relative_to(folder).as_posix(), digest] for path, digest in zip(files, hashes, strict=True)]
    return hashlib.sha256(b"weights\0" + canonical(named)).hexdigest()


def canonical(value: Any) -> bytes:
    """One text for equal settings, whatever the order of their keys; unknown types by their name and text."""
    return json.dumps(value, sort_keys=True, default=_as_text, separators=(",", ":")).encode()


def settings_digest(value: Any) -> str:
    return hashlib.sha256(b"settings\0" + canonical(value)).hexdigest()


def _file_hash(path: Path) -> str:
    blob = path.resolve().name
    if path.is_symlink() and _BLOB.fullmatch(blob):
        return blob
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _as_text(value: object) -> str:
    if isinstance(value, (set, frozenset)):
        return f"set:{sorted(map(str, value))}"
    return f"{type(value).__name__}:{value}"
