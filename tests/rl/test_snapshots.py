"""Snapshot ids: a part that changes takes along what was made for it, and a record of another version is refused."""

from __future__ import annotations

import pytest

from tfive.rl.snapshots import KINDS, Snapshots, WrongSnapshot

MADE_FOR = {
    "policy": {"policy", "scorer"},
    "scorer": {"scorer"},
    "scale": {"scale"},
    "critics": {"critics", "normaliser", "weight", "auxiliary", "validation"},
    "normaliser": {"normaliser", "weight", "auxiliary", "validation"},
    "weight": {"weight", "validation"},
    "auxiliary": {"auxiliary", "validation"},
    "validation": {"validation"},
}
"""What a change makes out of date: refreshing a part changes the moment target of everything learned under it."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_reaches_what_was_made_for_it(kind: str) -> None:
    snapshots = Snapshots()
    before = snapshots.current()
    assert snapshots.renew(kind) == snapshots.current()[kind]
    changed = {name for name, id_now in snapshots.current().items() if id_now != before[name]}
    assert changed == MADE_FOR[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stale_record_is_refused(kind: str) -> None:
    snapshots = Snapshots()
    recorded = snapshots.current()
    snapshots.require(recorded, KINDS, what="the set")
    snapshots.renew(kind)
    for stale in MADE_FOR[kind]:
        with pytest.raises(WrongSnapshot, match=rf"the set was made with {stale}-0, but {stale}-[12] is in force"):
            snapshots.require(recorded, (stale,), what="the set")
    snapshots.require(recorded, set(KINDS) - MADE_FOR[kind], what="the set")


def test_a_record_without_the_part_is_refused() -> None:
    snapshots = Snapshots()
    with pytest.raises(WrongSnapshot, match="made with no scale"):
        snapshots.require(snapshots.current("policy"), ("policy", "scale"), what="the set")


def test_ids_never_come_again() -> None:
    snapshots = Snapshots()
    seen = set()
    for kind in KINDS * 3:
        now = snapshots.renew(kind)
        assert now not in seen
        seen.add(now)


def test_the_state_goes_on_where_it_was() -> None:
    snapshots = Snapshots()
    for kind in ("policy", "critics", "scale", "critics"):
        snapshots.renew(kind)
    other = Snapshots()
    other.load_state_dict(snapshots.state_dict())
    assert other.current() == snapshots.current()
    assert other.renew("weight") == snapshots.renew("weight")
    with pytest.raises(ValueError, match="snapshot state names"):
        other.load_state_dict({"policy": 1})
