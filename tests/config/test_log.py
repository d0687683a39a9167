"""Log lines: one line an event, text and JSON, limited in rate, without secrets."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator

import pytest

from kvstore import log


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger; the root's handlers and level are put back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield logging.getLogger("kvstore.test")
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_lines(logger: logging.Logger) -> None:
    stream = io.StringIO()
    log.configure("info", "text", stream)
    logger.debug("not shown")
    logger.info("volume opened", extra={"fields": {"path": "/a b", "size_bytes": 5, "api_key": "k", "empty": ""}})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("failed")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].endswith('Z info    test: volume opened path="/a b" size_bytes=5 api_key=*** empty=""')
    assert "error   test: failed exception=" in lines[1]
    assert "ValueError: two\\nlines" in lines[1]


def test_json_lines(logger: logging.Logger) -> None:
    stream = io.StringIO()
    log.configure("debug", "json", stream)
    logger.debug("a %s", "b", extra={"fields": {"salt": "s3cret", "n": 1.5}})
    line = json.loads(stream.getvalue())
    assert line.pop("at").endswith("Z")
    assert line == {"level": "debug", "logger": "test", "message": "a b", "salt": "***", "n": 1.5}


def test_a_flood_is_cut_and_counted(logger: logging.Logger) -> None:
    stream = io.StringIO()
    log.configure("info", "text", stream)
    handler = logging.getLogger().handlers[0]
    handler.filters[:] = [log.RateLimit(lines=3, period_s=0.2)]
    for number in range(50):
        logger.info("refused %d", number)
    logger.info("another message")
    assert [line.split("test: ")[1] for line in stream.getvalue().splitlines()] == [
        "refused 0", "refused 1", "refused 2", "another message",
    ]  # fmt: skip
    time.sleep(0.25)
    logger.info("refused %d", 51)
    assert stream.getvalue().splitlines()[-1].endswith("test: refused 51 left_out=47")
