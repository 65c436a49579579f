"""The model card beside an exported model, and sending both to a hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import OfflineModeIsEnabled

from recorded import run
from tfive.cli.app import _call
from tfive.report.card import CARD, model_card
from tfive.training import start
from tiny import configure

EXPORTED = {"base": "maker/small", "actor_updates": 8, "window": 2, "finished": True, "gate": True}


def header(card: str) -> dict[str, Any]:
    _, head, _ = card.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(head)
    return found


def changed(folder: Path, **changes: Any) -> Path:
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    return folder


def test_what_a_hub_reads(tmp_path: Path) -> None:
    found = header(model_card(run(tmp_path / "run", "t5", 0, 0.3), EXPORTED))
    assert found["base_model"] == "maker/small"
    assert found["library_name"] == "transformers"
    assert {"tfive", "t5"} <= set(found["tags"])


def test_a_path_of_the_machine_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "secret" / "small").mkdir(parents=True)
    card = model_card(run(tmp_path / "run", "t5", 0, 0.3), EXPORTED | {"base": str(tmp_path / "secret" / "small")})
    assert "base_model" not in header(card)
    assert "secret" not in card
    assert "# t5 on small" in card


def test_figures_of_test_texts_stand_beside_their_controls(tmp_path: Path) -> None:
    interval = {"test_gain_vs_base_interval": [0.125, 0.375]}
    numbers = {"test_gain_vs_base_end": 0.25, "test_random_gain_end": -0.5, "dev_gain_vs_base_end": 0.75}
    folder = changed(run(tmp_path / "run", "t5", 0, 0.3), **numbers, **interval)
    card = model_card(folder, EXPORTED)
    assert "On test texts" in card
    assert "| Gain over the model before training | +0.2500 | +0.1250 … +0.3750 | – | " in card
    assert "random tokens in its place: −0.5000" in card
    (row,) = [line for line in card.splitlines() if line.startswith("| How much better")]
    assert "| +0.3000 |" in row
    assert "an empty thought in its place: +0.3000" in row
    assert "0.7500" not in card


def test_without_test_texts_the_figures_are_those_of_development(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "t5", 0, 0.3)
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    del summary["test"]
    (folder / "summary.json").write_text(json.dumps(summary | {"dev_gain_vs_base_end": 0.75}), "utf-8")
    card = model_card(folder, EXPORTED)
    assert "On development texts" in card
    assert "+0.7500" in card


@pytest.mark.parametrize(
    ("changes", "exported", "part"),
    [
        ({}, {"actor_updates": 0}, "> **Untrained.** No update ever reached this model"),
        ({"note": "critics never qualified: all 8 updates"}, {}, "> **Note.** Critics never qualified: all 8 updates."),
        ({}, {"finished": False}, "> **Unfinished.** The run had come to window 2"),
    ],
)
def test_what_is_wrong_is_said_first(tmp_path: Path, changes: Any, exported: Any, part: str) -> None:
    card = model_card(changed(run(tmp_path / "run", "t5", 0, 0.3), **changes), EXPORTED | exported)
    assert part in card
    assert card.index(part) < card.index("## ")
    assert card.index(part) < card.index("thoughts were learned")


def test_an_untrained_model_has_learned_nothing(tmp_path: Path) -> None:
    card = model_card(run(tmp_path / "run", "t5", 0, 0.3), EXPORTED | {"actor_updates": 0})
    assert "**No useful thoughts were learned: the model was never updated.**" in card


def test_names_cannot_break_the_card(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "t5", 0, 0.3)
    (folder / "config.toml").write_text('[[text.sources]]\nname = "a`|\\n## <b>x</b>"\n', "utf-8")
    card = model_card(folder, EXPORTED)
    assert "- `a ## b x /b`" in card
    assert "\n## <b>" not in card


class Hub:
    """A hub that keeps what it is sent, or cannot be reached."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.sent = error, dict[str, Any]()

    def __call__(self) -> Hub:
        return self

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> str:
        if self.error is not None:
            raise self.error
        self.sent["repo"] = repo, private, exist_ok
        return f"https://hub.example/{repo}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.sent["files"] = repo_id, {path.name for path in folder_path.iterdir()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tiny")
    start.train(configure(home, "window.windows=1", "method=ntp"), home / "run", quiet=True)
    return home / "run"


def test_an_export_with_its_card_goes_to_the_hub(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    assert _call(["export", str(trained), str(tmp_path / "out"), "--push", "me/thinker"]) == 0
    said = capsys.readouterr().out
    assert "pushed to https://hub.example/me/thinker" in said
    assert hub.sent["repo"] == ("me/thinker", True, True)
    repo, files = hub.sent["files"]
    assert repo == "me/thinker"
    assert {CARD, "config.json", "thoughts"} <= files
    card = (tmp_path / "out" / CARD).read_text("utf-8")
    assert 'snapshot_download("me/thinker")' in card
    assert "- `made-up`" in card
    assert "This method teaches no thoughts." in card
    assert "a control without thoughts" in card


def test_a_hub_that_cannot_be_reached_leaves_the_folder_and_one_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub(OfflineModeIsEnabled("no way out\nat all")))
    assert _call(["export", str(trained), str(tmp_path / "out"), "--push", "me/thinker"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"hf upload me/thinker {tmp_path / 'out'}" in said
    assert (tmp_path / "out" / CARD).is_file()


def test_a_name_that_no_hub_takes_is_refused_before_anything_is_written(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(["export", str(trained), str(tmp_path / "out"), "--push", "me/my/model"]) == 2
    assert "--push me/my/model: not the name of a repository" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
