"""Headroom on a tiny model: gains against plain scoring, the true working, and the critic's share."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tfive.cli.evaluate_headroom import headroom_command
from tfive.errors import UserError
from tfive.evaluate.diagnostics import SampleSize
from tfive.evaluate.headroom import explained
from tfive.text.workings import worked_texts
from tfive.training.progress import ProgressReport

pytestmark = pytest.mark.model

SIZE = SampleSize(texts=6, tokens=24, rows=8, seed=0)
TOML = (
    "[thought]\nlength = 3\ncheckpoints = [3]\nhorizon = 4\n"
    '[critic]\nadapt = "top"\nblocks = 1\nwidth = 8\nminibatches = 2\nhead_passes = 1\n'
)


def command(model: Path, corpus: Path, folder: Path, **changes: object) -> str:
    (folder / "t.toml").write_text(TOML, "utf-8")
    asked: dict[str, object] = {"config": folder / "t.toml", "size": SIZE, "per_text": 2, "pattern": "", "samples": 3}
    asked |= {"passes": 1, "device": "cpu", "compute": "float32", "as_json": True}
    text = headroom_command(str(model), [str(corpus)], **(asked | changes))  # type: ignore[arg-type]
    assert text is not None
    return text


def test_a_text_with_workings(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"text": f"river {n} mill: salt town rain. farm {n}: boat grain wind rain", "workings": [f" {n}", None]}
        for n in range(9)
    ]
    corpus = tmp_path / "worked.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    found = json.loads(command(exported, corpus, tmp_path, pattern=":"))
    assert found["all"]["items"] == 6
    assert found["all"]["best"][0] >= max(found["all"]["own"][0], found["all"]["mean"][0])
    assert found["all"]["best_or_none"][0] >= max(found["all"]["best"][0], 0)
    assert set(found["by_kind"]) == {"match"}
    assert len(found["all"]["true"]) == 3
    assert found["critic"]["items"] == 3
    assert found["critic"]["taking_the_best"] >= found["critic"]["taking_the_guessed_best"]
    shown, showing = list[tuple[str, bool]](), ProgressReport.showing

    def seen(report: ProgressReport, headline: Any, file: Path | None = None, *, drawn: bool = True) -> Any:
        shown.append((headline.line().partition(":")[0], drawn))
        return showing(report, headline, file, drawn=drawn)

    monkeypatch.setattr(ProgressReport, "showing", seen)
    table = command(exported, corpus, tmp_path, pattern=":", as_json=False, passes=0)
    assert "true working" in table
    assert "nats per token of the text behind a thought" in table
    assert "choosing among this model's own thoughts, by one who knows what follows, could gain +" in table
    command(exported, corpus, tmp_path, pattern=":", passes=0)
    (line, drawn), (_, for_programs) = shown
    assert line.endswith(" texts")
    assert "thoughts at each position of " in line
    assert drawn
    assert not for_programs
    rows[0]["workings"] = ["one"]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with pytest.raises(UserError, match=r"row 1: workings has 1, the pattern has 2 matches"):
        command(exported, corpus, tmp_path, pattern=":")


def test_prose_has_uniform_positions_and_no_true_working(exported: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "prose.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": f"{n} " + "river mill farm " * 12}) + "\n" for n in range(8)), "utf-8"
    )
    found = json.loads(command(exported, corpus, tmp_path, passes=0))
    assert (found["all"]["items"], "true" in found["all"], "critic" in found) == (12, False, False)
    for wrong, message in (({"pattern": "zzz"}, "ends at no token"), ({"pattern": "("}, "not a regular expression")):
        with pytest.raises(UserError, match=message):
            command(exported, corpus, tmp_path, **wrong)
    with pytest.raises(UserError, match="at least 4 texts"):
        command(exported, corpus, tmp_path, samples=1)
    with pytest.raises(UserError, match="--tokens 4: no place of these texts has the 4 tokens behind it"):
        command(exported, corpus, tmp_path, size=replace(SIZE, tokens=4), passes=0)
    plain = tmp_path / "plain"
    shutil.copytree(exported, plain, ignore=shutil.ignore_patterns("thoughts"))
    (tmp_path / "gated.toml").write_text(TOML.replace("[thought]\n", '[thought]\nreading = "gated"\n'), "utf-8")
    with pytest.raises(
        UserError, match=r"reading = gated: the gates of .* are shut, so every thought is worth exactly 0"
    ):
        command(plain, corpus, tmp_path, config=tmp_path / "gated.toml", passes=0)


def test_a_group_of_the_pattern_is_cut_out(tmp_path: Path, tokenizer: object) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "river mill: (7 boat) salt town"}) + "\n", "utf-8")
    pattern = re.compile(r":(?P<working> \(.*?\))")
    (one,) = worked_texts(path, tokenizer, pattern, length=64, per_text=2)
    decode = tokenizer.decode  # type: ignore[attr-defined]
    assert decode(list(one.tokens)) == "river mill: salt town"
    assert decode(list(one.tokens[: one.positions[0] + 1])) == "river mill:"
    assert one.workings[0] is not None
    assert decode(list(one.workings[0])) == " (7 boat)"


def test_what_a_critic_foresees_is_counted_within_positions() -> None:
    gain = torch.tensor([[[0.0, 2.0], [10.0, 12.0]], [[0.0, 0.0], [0.0, 0.0]]])
    valid = torch.tensor([[[True] * 2] * 2, [[False] * 2] * 2])
    between = gain.mean(-1, keepdim=True).expand_as(gain)
    found = explained(gain, between, valid)
    assert found["r2"] == pytest.approx(1 - 1 / 26)
    assert found["r2_within"] == pytest.approx(0.0)
    assert found["within_share"] == pytest.approx(1 / 26)
    assert explained(gain, gain + 5, valid)["r2_within"] == pytest.approx(1.0)
    assert explained(gain, -gain, valid)["taking_the_guessed_best"] == pytest.approx(-1.0)
