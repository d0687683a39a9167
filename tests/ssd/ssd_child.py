"""A process of its own for the tests: opens a volume, or writes until it is killed, telling each step on stdout.

ssd_child.py hold FOLDER              open, print "open", wait for stdin to end
ssd_child.py write FOLDER SEED        endless durable and plain writes, recycled places and deletes;
                                      prints "try NUMBER PLACE SEQUENCE" before, "done ..." after a durable write,
                                          "plain ..." after another, "drop ..." before a delete, "gone ..." after
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from ssd_rig import Rig

from kvstore.backend import Item
from kvstore.record import HEADER_BYTES
from kvstore.testing.chunks import ROOT, filled, layout_of, make_key

LAYOUT = layout_of(96 * 1024)


def say(*words: object) -> None:
    print(*words, flush=True)


def item_of(number: int, place: int, sequence: int) -> Item:
    return Item(ROOT, 0, make_key(number, seed=5), LAYOUT, place=place, sequence=sequence)


def write(folder: Path, seed: int) -> None:
    rig = Rig(folder, size_bytes=8 << 20)
    draw = random.Random(seed)
    stride = HEADER_BYTES + LAYOUT.slot_bytes
    if not rig.loaded.segments:
        rig.volume.format_segment(0, 1, stride)
    places = [HEADER_BYTES + slot * stride for slot in range(30)]
    sequence = rig.loaded.max_sequence
    live: dict[int, Item] = {}
    say("open")
    while True:
        start = draw.randrange(len(places) - 4)
        durable = draw.random() < 0.5
        items = []
        for place in places[start : start + draw.randint(1, 4)]:
            sequence += 1
            items.append(item_of(sequence, place, sequence))
        for item in items:
            say("try", item.sequence, item.place)
            live[item.place] = item
        assert not any(rig.volume.write(items, filled(items), durable))
        for item in items:
            say("done" if durable else "plain", item.sequence, item.place)
        if draw.random() < 0.2:
            victim = live.pop(draw.choice(list(live)))
            say("drop", victim.sequence, victim.place)
            rig.volume.delete([victim])
            say("gone", victim.sequence, victim.place)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        rig = Rig(Path(sys.argv[2]))
        say("open")
        sys.stdin.read()
        rig.volume.close()
    else:
        write(Path(sys.argv[2]), int(sys.argv[3]))
