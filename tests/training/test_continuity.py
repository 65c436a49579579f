"""A run goes on with what it began with: other weights, settings, files or folders of another process are refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tfive.cli.app import _call
from tfive.errors import UserError
from tfive.rl.critic_files import load_critics
from tfive.text.prepared import PreparedCorpus
from tfive.training import continuity, start
from tfive.training.cells import Cell
from tfive.training.checkpoint import CheckpointStore
from tfive.training.compare import launch
from tfive.training.corpus import corpus_of
from tfive.training.devices import Placement
from tfive.training.export import export
from tfive.training.health import problems, relative_change
from tfive.training.lock import LOCK, FolderLock, held
from tfive.training.loop import Stopped
from tfive.training.manifest import signed
from tfive.training.run_folder import CHECKPOINTS
from tfive.training.summary import SUMMARY, read_summary
from tiny import OVERRIDES, configure

PLAIN = ("method=ntp", "run.checkpoint_every=1", "window.windows=2")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def stopped(home: Path) -> Path:
    """A run of one window that has more to do."""
    folder = home / "stopped"

    def stop(report: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    with pytest.raises(Stopped, match="SIGHUP: saved"):
        start.train(configure(home, *PLAIN), folder, on_window=stop, quiet=True)
    assert not (folder / LOCK).exists()
    return folder


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


def one_line(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    capsys.readouterr()
    assert _call(words) == status
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err
    return shown.err


def change(folder: Path, key: str, value: str) -> None:
    text = (folder / "config.toml").read_text("utf-8")
    section, _, name = key.rpartition(".")
    head, mark, rest = text.partition(f"[{section}]\n")
    assert mark
    rest, changed = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", rest, count=1)
    assert changed
    (folder / "config.toml").write_text(head + mark + rest, "utf-8")


def test_other_base_weights_are_refused(home: Path, copy: Path, tmp_path: Path) -> None:
    """One value of one weight, beyond what any sample of it would show, in a file of the same size and time."""
    model = shutil.copytree(home / "model", tmp_path / "model")
    path = model / "model.safetensors"
    before = path.stat()
    weights = load_file(path)
    weights["model.embed_tokens.weight"][-1, -1] += 1
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    change(copy, "model.name", f'"{model}"')
    for again in (lambda: start.resume(copy, quiet=True), lambda: export(copy, tmp_path / "out")):
        with pytest.raises(UserError, match=r"model\.safetensors is not what the run began with"):
            again()
    assert not (tmp_path / "out").exists()


def test_a_model_that_only_moved_goes_on(home: Path, copy: Path, tmp_path: Path) -> None:
    change(copy, "model.name", f'"{shutil.copytree(home / "model", tmp_path / "model")}"')
    change(copy, "window.windows", "1")
    summary = start.resume(copy, quiet=True)
    assert summary["windows"] == 1
    said = [json.loads(line) for line in (copy / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert {line["detail"].split(" = ")[0] for line in said if line.get("event") == "resumed"} == {
        "model.name", "window.windows",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer.lr", "0.5"), ("gate.passes", "0"), ("thought.open", '" ["'), ("window.items", "8"),
     ("thought.horizon", "2"), ("critic.width", "9"), ("text.sequence_length", "24"), ("run.seed", "7")],
)  # fmt: skip
def test_an_edited_configuration_is_refused_by_key(copy: Path, tmp_path: Path, key: str, value: str) -> None:
    change(copy, key, value)
    for again in (lambda: start.resume(copy, quiet=True), lambda: export(copy, tmp_path / "out")):
        with pytest.raises(UserError, match=re.escape(f"{key} = ")) as error:
            again()
        assert "the run began with" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_what_may_change_exists_and_longer_runs_keep_their_schedule(home: Path) -> None:
    config = configure(home, *PLAIN)
    assert set(continuity.MAY_CHANGE) <= set(config.leaves())
    began = continuity.record(config, {"model.safetensors": "1"}, "text")
    longer = configure(home, *PLAIN, "window.windows=9", "run.texts_per_pass=2")
    said = continuity.check(began, longer, {"model.safetensors": "1"}, "text", home)
    assert [line.partition(" = ")[0] for line in said] == ["window.windows", "run.texts_per_pass"]
    assert "last bits" in said[1]
    older = {**began, "config": {key: value for key, value in began["config"].items() if key != "critic.features"}}
    assert continuity.check(older, config, None, None, home) == []
    with pytest.raises(UserError, match=r"critic\.features = 'policy', the run began with 'base'"):
        continuity.check(older, configure(home, *PLAIN, "critic.features=policy", "critic.adapt=top"), None, None, home)
    falling = configure(home, *PLAIN, "optimizer.schedule=linear")
    changed = configure(home, *PLAIN, "optimizer.schedule=linear", "window.windows=9")
    with pytest.raises(UserError, match=r"optimizer\.schedule = linear depends on it"):
        continuity.check(continuity.record(falling, {}, "text"), changed, {}, "text", home)
    with pytest.raises(UserError, match="prepared corpus has changed"):
        continuity.check(began, config, {"model.safetensors": "1"}, "other", home)
    with pytest.raises(UserError, match="does not say what the run began with"):
        continuity.check(None, config, None, None, home)


def test_a_callers_own_model_is_not_mistaken_for_the_named_one(home: Path) -> None:
    config = configure(home, *PLAIN)
    began = continuity.record(config, {"in memory": "1"}, "text")
    with pytest.raises(UserError, match="a model of the caller's own"):
        continuity.check(began, config, {"model.safetensors": "1"}, "text", home)


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"method": "t5"', "[" * 5000, '{"method": 3, "history": []}'])
def test_a_summary_of_something_else_is_one_line(copy: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / SUMMARY).write_text(content, "utf-8")
    for command in (["resume", str(copy)], ["report", str(copy)]):
        assert "tfive resume" in one_line(command, capsys)
    with pytest.raises(UserError, match=re.escape(str(copy / SUMMARY))):
        read_summary(copy)


def rewritten(checkpoint: Path, **entries: Any) -> None:
    """Another tree behind checksums that hold."""
    store = CheckpointStore(checkpoint.parent, keep=100)
    tree = {**store.load(checkpoint), **entries}
    shutil.rmtree(checkpoint)
    os.rename(store.save(tree), checkpoint)
    manifest = json.loads((checkpoint / "manifest.json").read_text("utf-8"))
    manifest["serial"] = int(checkpoint.name.rpartition("-")[2])
    (checkpoint / "manifest.json").write_bytes(signed(manifest))


@pytest.mark.parametrize("entry", ["method", "ledger", "recorder", "history", "places", "began"])
def test_a_checkpoint_of_another_shape_is_one_line(copy: Path, entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    newest = CheckpointStore(copy / CHECKPOINTS).paths()[-1]
    rewritten(newest, **{entry: {"window": torch.zeros(2)}})
    assert str(copy) in one_line(["resume", str(copy), "--quiet"], capsys)


def test_a_tree_that_nests_without_end_or_names_other_files_is_damaged(copy: Path) -> None:
    import hashlib

    newest = CheckpointStore(copy / CHECKPOINTS).paths()[-1]
    nested = b"[" * 100_000
    for name, content in (("tree.json", nested), ("../../config.toml", b"")):
        manifest = json.loads((newest / "manifest.json").read_text("utf-8"))
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        if content:
            (newest / name).write_bytes(content)
        (newest / "manifest.json").write_bytes(signed(manifest))
        store = CheckpointStore(copy / CHECKPOINTS)
        assert [path.name for path, _ in store.newest().damaged] == [newest.name]
        assert store.entry("began") is not None


def test_a_folder_in_use_is_refused_and_a_dead_lock_is_recognised(
    home: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FolderLock(copy):
        assert f"process {os.getpid()} on " in str(held(copy))
        assert "in use by process" in one_line(["resume", str(copy)], capsys)
        (copy.parent / "new").mkdir()
        with FolderLock(copy.parent / "new"), pytest.raises(UserError, match="in use by process"):
            start.train(configure(home, *PLAIN), copy.parent / "new", quiet=True)
    assert held(copy) is None
    script = (
        "import os, signal, sys; from pathlib import Path; from tfive.training.lock import FolderLock; "
        "FolderLock(Path(sys.argv[1])).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    dead = subprocess.run([sys.executable, "-c", script, str(copy)], check=False)
    assert dead.returncode == -signal.SIGKILL
    assert (copy / LOCK).exists()
    assert held(copy) is None
    with FolderLock(copy) as lock:
        assert re.fullmatch(r"process \d+ on .* since .* UTC", lock.left_by or "")
    assert not (copy / LOCK).exists()


def test_a_lock_of_another_machine_holds_until_it_is_removed(tmp_path: Path) -> None:
    holder = {"host": "elsewhere", "process": 1, "boot": "another", "since": "noon"}
    (tmp_path / LOCK).write_text(json.dumps(holder), "utf-8")
    (tmp_path / "status.json").touch()
    os.utime(tmp_path / "status.json", (time.time() - 5 * 3600,) * 2)
    said = r"process 1 on elsewhere since noon, another machine, .*last written 5 hours ago.*; .*, remove .*\.lock$"
    with pytest.raises(UserError, match=said), FolderLock(tmp_path):
        pass
    assert held(tmp_path) == "process 1 on elsewhere since noon"
    for odd in ("", "[]", "{", "[" * 3000):
        (tmp_path / LOCK).write_text(odd, "utf-8")
        with FolderLock(tmp_path):
            pass


def test_a_lock_leaves_no_folder_behind(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK).is_file()
    assert not (tmp_path / "a").exists()


def test_other_threads_are_said(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described = Placement.describe
    monkeypatch.setattr(Placement, "describe", lambda self: {**described(self), "threads": 64})
    summary = start.resume(copy)
    assert "threads: 1 → 64; numbers may differ in their last bits" in capsys.readouterr().err
    assert [place["threads"] for place in summary["places"]] == [1, 64]
    assert summary["places"][1]["window"] == 1


def test_nohup_is_respected(home: Path, tmp_path: Path) -> None:
    def hang_up(report: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        config = configure(home, "method=ntp", "run.checkpoint_every=0", "window.windows=1")
        assert start.train(config, tmp_path / "run", on_window=hang_up, quiet=True)["windows"] == 1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_destroyed_model_ends_with_status_1_and_says_so_first(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(home)
    words = ["train", str(home / "tiny.toml"), *(f"--set={one}" for one in (*OVERRIDES, *PLAIN)), "--json"]
    assert _call([*words, "--set=optimizer.lr=1", "--set=run.seed=1", "--out", str(tmp_path / "run")]) == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert "destroyed" in found["problems"][0]
    told = shown.err.splitlines()
    summary = next(number for number, line in enumerate(told) if "window" in line and " s, " in line)
    assert told[summary - 1].startswith("DO NOT USE THESE NUMBERS: the model is destroyed")
    assert told[-1].startswith("tfive: error: the model is destroyed")
    assert _call(["resume", str(tmp_path / "run")]) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        # The same thought twice at every position: nothing to compare.
        ("method=quiet-star-grpo", "thought.group=2", "sampling.top_k=1"),
        ("method=rlp", "thought.group=2", "sampling.top_k=1"),
        # The correction drops every token.
        ("method=quiet-star-grpo", "thought.group=2", "sampling.temperature=50", "ratio.correction=mask",
         "ratio.cap=1.0001"),
    ],
)  # fmt: skip
def test_a_run_that_no_reward_could_move_ends_with_status_1_and_says_so_first(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...]
) -> None:
    configure(home)
    chosen = (*OVERRIDES, "window.windows=1", "window.actor_steps=1", *overrides)
    words = ["train", str(home / "tiny.toml"), *(f"--set={one}" for one in chosen), "--out", str(tmp_path / "run")]
    assert _call(words) == 1
    told = capsys.readouterr().err.splitlines()
    summary = next(number for number, line in enumerate(told) if "window" in line and " s, " in line)
    assert told[summary - 1].startswith("DO NOT USE THESE NUMBERS: no reward could move the actor")
    assert told[-1].startswith("tfive: error: no reward could move the actor")


def test_a_run_that_moved_nothing_is_no_result(home: Path) -> None:
    config = configure(home, *PLAIN)
    sound = [{"no_thought_loss": 3.0}, {"no_thought_loss": 2.9}]
    assert problems(config, sound, 1e-3, 320) == []
    assert "did not move" in problems(config, sound, 0.0, 320)[0]
    assert "did not move" in problems(config, sound, float("nan"), 320)[0]
    assert problems(configure(home, "method=base"), sound, 0.0, 320) == []
    assert problems(config, sound, 1e-3, 320, 0.02) == []
    for push in (0.0, 5e-6, float("nan")):
        assert "no reward could move the actor" in problems(config, sound, 1e-3, 320, push)[0]
    for last in (float("nan"), float("inf"), 4.1, 5.76):
        assert "destroyed" in problems(config, [sound[0], {"no_thought_loss": last}], 1e-3, 320)[0]
    assert problems(config, [{"no_thought_loss": 5.7}, {"no_thought_loss": 5.76}], 1e-3, 320) == []
    weights = {"a": torch.tensor([3.0, 4.0])}
    assert relative_change([("a", torch.tensor([3.0, 4.5])), ("new", torch.ones(1))], weights) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("thought.length=65536", "thought.checkpoints=[65536]"), "positions are needed"),
        (("text.sequences.calibration=1024",), r"text\.sequences\.\w+: 1 sequence with 2 positions, 2 of them in one"),
        (("text.sequence_length=64",), r"text\.sequence_length = 64: .* use text\.sequence_length = \d+ or less"),
        (("method=quiet-star-grpo", "thought.group=4096", "window.items=100000", "text.sequences.train=1000000",
          "run.texts_per_pass=60000", "text.sequences.calibration=100000"), "this run needs about .*thought.group"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused_before_anything_is_written(
    home: Path, tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        start.train(configure(home, *overrides), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_every_checkpoint_says_what_the_run_began_with(stopped: Path, home: Path) -> None:
    began = CheckpointStore(stopped / CHECKPOINTS).entry("began")
    assert began["config"] == configure(home, *PLAIN).leaves()
    assert set(began["model"]) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("content", ["{}", "[]", '{"cells": 3}', '{"cells": [{"label": 1}]}', '{"cells": [[]]}'])
def test_a_study_of_something_else_is_one_line(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.json").write_text(content, "utf-8")
    assert str(tmp_path) in one_line(["report", str(tmp_path)], capsys)


@pytest.mark.parametrize("critics", ["[]", '{"critics": [3, 4]}', '{"critics": []}', "[" * 5000])
def test_critics_of_something_else_are_one_line(tmp_path: Path, critics: str) -> None:
    (tmp_path / "critics.json").write_text(critics, "utf-8")
    with pytest.raises(UserError, match=r"critic\.start = .* cannot be loaded"):
        load_critics(tmp_path, [None])  # type: ignore[list-item]


def test_a_manifest_of_something_else_is_one_line(home: Path, tmp_path: Path) -> None:
    prepared = corpus_of(configure(home, *PLAIN)).folder
    whole = json.loads((prepared / "manifest.json").read_text("utf-8"))
    folder = shutil.copytree(prepared, tmp_path / "corpus")
    for entry, content in (
        ("files", {}), ("files", None), ("files", {**whole["files"], "../../x": {}}), ("groups", [{}]), ("groups", 3),
        ("files", {**whole["files"], "tokens.npy": 3}), ("groups", [[]]),
    ):  # fmt: skip
        (folder / "manifest.json").write_text(json.dumps(whole | {entry: content}), "utf-8")
        with pytest.raises(UserError, match="prepare again"):
            PreparedCorpus(folder)


def test_records_of_a_study_that_hold_something_else_are_one_line(home: Path, tmp_path: Path) -> None:
    cell = Cell("ntp", 0, configure(home, *PLAIN), tmp_path / "cell")
    for content in ("[]", "{", "null"):
        cell.record.write_text(content, "utf-8")
        with pytest.raises(UserError, match="holds no record of a run"):
            cell.known()


def test_a_study_does_not_clear_a_folder_in_use(home: Path, tmp_path: Path) -> None:
    cell = Cell("ntp", 0, configure(home, *PLAIN), tmp_path / "cells" / "ntp-seed0")
    with FolderLock(cell.folder):
        (cell.folder / "metrics.jsonl").write_text("mine", "utf-8")
        with pytest.raises(UserError, match="in use by process"):
            launch(cell, None)
        assert (cell.folder / "metrics.jsonl").read_text("utf-8") == "mine"
