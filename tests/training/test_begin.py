"""How a run begins in a folder: anew, again where its launch had begun it, and never in a folder of another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfive.config.config import Config
from tfive.distributed.environment import Launched
from tfive.distributed.meeting import Meeting
from tfive.errors import UserError
from tfive.training.begin import AGAIN, LAUNCH, NEW, RESUMED, new_folder, stopped_folder
from tfive.training.lock import LOCK, FolderLock


def begun(folder: Path, launch: str | None, write: bool = True) -> str:
    """How a run of that launch begins; it then writes what every run writes first."""
    with new_folder(Meeting(Launched(launch=launch)), folder, lambda: None, quiet=True) as found:
        if write:
            found.prepare(Config.load("nano"), own=False)
        return found.how


def test_a_launch_goes_on_with_what_it_began(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert begun(folder, "job", write=False) == NEW
    assert not folder.exists()
    assert begun(folder, "job") == NEW
    (folder / "metrics.jsonl").write_text("of the first attempt\n")
    assert begun(folder, "job") == AGAIN
    assert not (folder / "metrics.jsonl").exists()
    (folder / "checkpoints" / "checkpoint-00000001").mkdir(parents=True)
    assert begun(folder, "job") == RESUMED
    for other in ("another job", None):
        with pytest.raises(UserError, match="already holds files; go on with tfive resume"):
            begun(folder, other)


def test_a_launch_that_died_at_once_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    (tmp_path / LAUNCH).write_text("first job")
    assert begun(tmp_path, "second job") == NEW
    assert (tmp_path / LAUNCH).read_text() == "second job"


def test_the_lock_of_a_lost_node_is_its_launchs_own(tmp_path: Path) -> None:
    left = {"host": "lost-node", "process": 7, "boot": "elsewhere", "since": "then", "launch": "job"}
    for launch, taken in (("job", True), ("another", False), (None, False)):
        (tmp_path / LOCK).write_text(json.dumps(left))
        if taken:
            with FolderLock(tmp_path, launch) as lock:
                assert lock.left_by == "process 7 on lost-node since then"
        else:
            with pytest.raises(UserError, match="locked by process 7 on lost-node"), FolderLock(tmp_path, launch):
                pass


def test_a_run_of_the_callers_own_model_does_not_begin_again_with_another(tmp_path: Path) -> None:
    def resumed() -> str:
        with stopped_folder(Meeting(Launched()), tmp_path, lambda: None, prepares=False, quiet=True) as found:
            return found.how

    with new_folder(Meeting(Launched()), tmp_path, lambda: None, quiet=True) as first:
        first.prepare(Config.load("nano"), own=False)
    assert resumed() == AGAIN
    first.prepare(Config.load("nano"), own=True)
    assert resumed() == RESUMED
