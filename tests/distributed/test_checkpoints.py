"""Checkpoints of several processes over gloo: a run is stopped by four, goes on by two, by one, and by four again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lives import SETTINGS
from processes import run_world

from tfive.models.load import load_model
from tfive.training.checkpoint import CheckpointStore
from tfive.training.corpus import corpus_of
from tfive.training.export import export
from tfive.training.run_folder import CHECKPOINTS
from tiny import configure
from training.test_resume import final_state, lines, same

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lives")


@pytest.fixture(scope="module")
def lived(home: Path) -> list[dict[str, Any]]:
    config = configure(home, *SETTINGS)
    corpus_of(config, loaded=load_model(config.model.name, device="cpu"))  # once, for all processes
    return run_world(4, "lives:every_life", str(home))


def test_the_same_number_goes_on_bit_for_bit(home: Path, lived: list[dict[str, Any]]) -> None:
    for whole, stopped in (("undisturbed", "stopped"), ("roles", "roles stopped")):
        same(final_state(home / whole), final_state(home / stopped))
        assert lines(home / whole) == lines(home / stopped)


def test_four_two_one_four_goes_on(home: Path, lived: list[dict[str, Any]]) -> None:
    assert [life["restored"] for life in lived] == [[4, 2, 1, 4], [4, 2, 4], [2, 4, 4], [2, 4, 4]]
    moved = json.loads((home / "moved" / "summary.json").read_text("utf-8"))
    assert moved["windows"] == 4
    assert [place.get("processes", 1) for place in moved["places"]] == [4, 2, 1, 4]
    manifest = json.loads(
        (CheckpointStore(home / "moved" / CHECKPOINTS).paths()[-1] / "manifest.json").read_text("utf-8")
    )
    assert manifest["ranks"] == 4
    assert {name[:11] for name in manifest["files"]} >= {f"parts-0000{rank}" for rank in range(4)}
    assert all(life["pieces"] for life in lived)


def test_one_process_exports_what_four_wrote(home: Path, lived: list[dict[str, Any]], tmp_path: Path) -> None:
    record = export(home / "moved", tmp_path / "out")
    assert (record["window"], record["finished"]) == (4, True)


def test_shards_of_fsdp_are_stored_and_refused_by_name(lived: list[dict[str, Any]]) -> None:
    for life in lived:
        assert life["sharded"] == lived[0]["sharded"]
    assert len(lived[0]["sharded"]) == 2
    for line in lived[0]["sharded"]:
        assert "parts-00001-00000.safetensors: checksum mismatch" in line
