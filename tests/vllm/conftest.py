"""A daemon and an engine that the tests of one file share: starting an engine takes as long as many tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny_models
from engine_process import EngineProcess
from vllm_rig import CHUNK_TOKENS, PATIENT_S, Rig

from kvstore.testing.daemon import DaemonProcess


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("rig")
    with DaemonProcess(folder / "daemon") as daemon:
        options = {"socket_path": str(daemon.socket_path), "chunk_tokens": CHUNK_TOKENS, "lookup_timeout_s": PATIENT_S}
        with EngineProcess(folder, tiny_models.llama().folder(), options) as engine:
            yield Rig(daemon, engine)
