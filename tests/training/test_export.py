"""What a run leaves behind can be used: by plain transformers, and with its thoughts; nothing else is ever written."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tfive.cli.app import _call
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.inference.thought_model import ThoughtModel
from tfive.models.load import load_model
from tfive.models.weights import model_digests
from tfive.rl.gate import PredictionGate
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.qualify import Qualifier
from tfive.text.settings import KINDS
from tfive.text.tokens import TextTokenizer
from tfive.training import continuity, start
from tfive.training.checkpoint import CheckpointStore
from tfive.training.explorer import Pieces
from tfive.training.export import export
from tfive.training.run_folder import CHECKPOINTS, save_config
from tiny import configure, tokenizer

pytestmark = pytest.mark.model

TEXT = "7 river mill farm ( boat grain ) salt paper town count apple letter ."
ROW = torch.arange(1, 30)[None]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """A whole tiny run with learned delimiters, so that every part there is has been trained."""
    with pytest.MonkeyPatch.context() as patch:
        # Critics of this size qualify by luck alone; here it only matters that the actor moves.
        patch.setattr(Qualifier, "_criterion", lambda *_: (True, "let through"))
        start.train(configure(home, "window.windows=1", "thought.delimiters=learned"), home / "run", quiet=True)
    return home / "run"


def state_of(folder: Path) -> dict[str, Any]:
    found = CheckpointStore(folder / CHECKPOINTS).newest()
    assert found.checkpoint is not None
    state: dict[str, Any] = found.checkpoint.tree["method"]
    return state


def made(folder: Path, config: Config, compute: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    """A run folder with one checkpoint that holds what an export reads, after one step of the optimizer."""
    model = load_model(config.model.name, device="cpu", dtype=compute).model
    optimizer = MasterOptimizer(list(model.named_parameters()), lr=1e-3)
    model(ROW).logits.float().square().mean().backward()
    optimizer.step()
    gate = {"gate": dict(PredictionGate(16, width=8, seed=4).state_dict()), "optimizer": {"steps": 3}, "constant": 0.5}
    actor = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    state = {"window": 2, "phase": "update", "actor": actor, "gate": gate} | changes
    save_config(config, folder)
    CheckpointStore(folder / CHECKPOINTS).save({"method": state, "began": began(config)})
    return state


def began(config: Config) -> dict[str, Any]:
    """What a run with this configuration notes of its beginning."""
    return continuity.record(config, model_digests(config.model.name), "no corpus")


def test_a_run_becomes_a_model_that_thinks(trained: Path, tmp_path: Path) -> None:
    record = export(trained, tmp_path / "out")
    state = state_of(trained)
    assert record["window"] == 1
    assert record["damaged"] == []
    assert record["gate_updates"] == state["gate"]["optimizer"]["steps"] > 0
    assert record["actor_updates"] == state["actor"]["optimizer"]["steps"] > 0
    (tmp_path / "ordinary").touch()
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "ordinary").stat().st_mode & 0o777}
    model = ThoughtModel.from_pretrained(tmp_path / "out", device="cpu", dtype=torch.float32)
    for name, tensor in model.model.state_dict().items():
        assert tensor.equal(state["actor"]["model"][name]), name
    assert model.gate is not None
    assert all(tensor.equal(state["gate"]["gate"][name]) for name, tensor in model.gate.state_dict().items())
    assert model.delimiters is not None
    assert model.delimiters.weight_2D.equal(state["actor"]["delimiters"]["weight_2D"])
    assert {key: record[key] for key in model.origin} == model.origin
    base = load_model(trained.parent / "model", device="cpu").model
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert alone(ROW).logits.equal(model.model(ROW).logits)
    assert not alone(ROW).logits.equal(base(ROW).logits)
    found = model.predict(TEXT)
    assert found.thoughts
    assert bool(found.mixed.isfinite().all())
    assert len(model.generate("7 river", max_new_tokens=5, show=True).ids) == 5


def test_every_number_of_a_run_is_explained(trained: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "diagnostics.md").read_text("utf-8")
    explained = set(re.findall(r"`([a-z_0-9.]+)`", page))
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text("utf-8").splitlines()]
    keys = {key for line in lines for key in line} - {"step", "seconds", "event", "detail"}
    kinds = "|".join(KINDS)
    plain = {re.sub(rf"(_interval)?(\.\d+)*$|_({kinds})$", "", key.removeprefix("development.")) for key in keys}
    assert {"r2", "offset", "thought_gain"} <= plain
    assert sorted(plain - explained) == []


def test_the_thoughts_kept_for_the_page_are_those_that_were_measured(trained: Path) -> None:
    """Token by token they add up to the gains, item by item, of the same measurement."""
    places = load_file(trained / "explorer" / "texts.safetensors")
    for window in (0, 1):
        kept = load_file(trained / "explorer" / f"window-{window:05d}.safetensors")
        items = load_file(trained / "develop" / f"window-{window:05d}.safetensors")
        assert places["item"].tolist() == items["item"].tolist()
        assert kept["length"].tolist() == items["length"].tolist()
        mean = {
            name: kept[name].astype(np.float64).sum(1) / kept["horizon"]
            for name in ("without", "own", "empty", "other")
        }
        for name, gain in (("own", "thought_gain"), ("other", "other_gain"), ("empty", "empty_gain")):
            np.testing.assert_allclose(mean["without"] - mean[name], items[gain], atol=0.01)
    # One critic's advantages and the other's, mixed by the weight, are what the actor would get (eq:twin-advantage).
    first, second = kept["advantages"].astype(np.float64)
    weight = kept["weight"].astype(np.float64)
    np.testing.assert_allclose(weight * first + (1 - weight) * second, kept["mixed"], atol=0.01)
    assert "values" not in load_file(trained / "explorer" / "window-00000.safetensors")
    assert {path.stat().st_mode & 0o777 for path in (trained / "explorer").iterdir()} == {0o666 & ~umask()}


def umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def test_no_thoughts_are_kept_where_none_are_asked_for(home: Path) -> None:
    start.train(configure(home, "method=base", "run.explorer_items=0"), home / "none", quiet=True)
    assert not (home / "none" / "explorer").exists()
    start.train(configure(home, "method=base", "run.explorer_items=3"), home / "three", quiet=True)
    kept = load_file(home / "three" / "explorer" / "window-00000.safetensors")
    assert kept["own"].shape == (3, 3)
    assert len(load_file(home / "three" / "explorer" / "texts.safetensors")["tokens"]) == 2


def test_pieces_of_tokens_are_the_text(home: Path) -> None:
    """Tokens that are parts of one character have no text of their own but the last, which has it whole."""
    pieces = Pieces(TextTokenizer.of(tokenizer()))
    ids = tokenizer()("7 river \N{SNOWMAN} mill")["input_ids"]
    numbers = pieces.of(ids)
    found = pieces.arrays()
    content, ends = found["pieces"].tobytes(), [0, *found["piece_ends"].tolist()]
    words = [content[ends[n] : ends[n + 1]].decode() for n in numbers]
    assert "".join(words) == "7 river \N{SNOWMAN} mill"
    assert len(words) == len(ids)
    whole = next(n for n, word in enumerate(words) if "\N{SNOWMAN}" in word)
    assert words[whole - 1] == ""


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_taken_when_asked(home: Path, tmp_path: Path) -> None:
    config, run = configure(home), tmp_path / "run"
    first = made(run, config)
    made(run, config, window=3)
    newest = CheckpointStore(run / CHECKPOINTS).paths()[-1]
    (newest / "tree.json").write_bytes((newest / "tree.json").read_bytes()[:-1])
    refused(run, tmp_path / "out", "tree.json: checksum mismatch.*older one with --skip-damaged")
    record = export(run, tmp_path / "out", skip_damaged=True)
    assert record["window"] == 2
    assert record["damaged"] == [f"{newest.name} cannot be used (tree.json: checksum mismatch); skipped"]
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(tensor.equal(first["actor"]["model"][name]) for name, tensor in weights.items())
    shutil.rmtree(CheckpointStore(run / CHECKPOINTS).paths()[0])
    refused(run, tmp_path / "other", "no usable checkpoint")


def test_exact_weights_are_the_masters(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = made(run, configure(home), torch.bfloat16)
    masters = {name: entry["master"] for name, entry in state["actor"]["optimizer"]["parameters"].items()}
    export(run, tmp_path / "compute")
    export(run, tmp_path / "exact", exact=True)
    compute = AutoModelForCausalLM.from_pretrained(tmp_path / "compute")
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "exact")
    for name, parameter in exact.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.equal(masters[name]), name
    for name, parameter in compute.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.equal(masters[name].bfloat16()), name


def test_a_run_without_gate_and_the_callers_own_model(home: Path, tmp_path: Path) -> None:
    config, run = configure(home), tmp_path / "run"
    made(run, config, gate=None)
    text = (run / "config.toml").read_text("utf-8").replace(config.model.name, "nowhere/at-all")
    (run / "config.toml").write_text(text, "utf-8")
    record = export(run, tmp_path / "out", model=load_model(config.model.name, device="cpu"))
    assert record["gate"] is False
    assert ThoughtModel.from_pretrained(tmp_path / "out", device="cpu").gate is None


def refused(run: Path, out: Path, part: str) -> None:
    before = sorted(out.rglob("*")) if out.exists() else None
    with pytest.raises(UserError, match=part) as error:
        export(run, out)
    assert "\n" not in str(error.value)
    assert (sorted(out.rglob("*")) if out.exists() else None) == before


def old_checkpoint(run: Path) -> None:
    for manifest in (run / CHECKPOINTS).glob("*/manifest.json"):
        written = json.loads(manifest.read_text("utf-8"))
        manifest.write_text(json.dumps({**written, "format": 1}), "utf-8")


def old_key(run: Path) -> None:
    with (run / "config.toml").open("a", encoding="utf-8") as file:
        file.write("[critics]\ncount = 2\n")


@pytest.mark.parametrize(
    ("age", "part"),
    [
        (old_checkpoint, "written by another version of tfive (format 1, this one reads 4)"),
        (old_key, "not a configuration of this version of tfive: critics.count"),
    ],
)
def test_a_run_of_another_version_is_refused_in_one_line(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], age: Callable[[Path], None], part: str
) -> None:
    run = tmp_path / "run"
    made(run, configure(home))
    age(run)
    refused(run, tmp_path / "out", re.escape(part))
    capsys.readouterr()
    assert _call(["resume", str(run), "--quiet"]) == 2
    shown = capsys.readouterr().err
    assert part in shown
    assert shown.count("\n") == 1


def test_what_cannot_be_exported_is_one_line_and_writes_nothing(home: Path, tmp_path: Path) -> None:
    config = configure(home)
    refused(tmp_path / "absent", tmp_path / "out", "no run here")
    empty = tmp_path / "empty"
    save_config(config, empty)
    refused(empty, tmp_path / "out", "no usable checkpoint")
    run = tmp_path / "run"
    made(run, config)
    full = tmp_path / "full"
    full.mkdir()
    (full / "kept").write_text("as it was")
    refused(run, full, "not empty")
    (tmp_path / "file").write_text("in the way")
    refused(run, tmp_path / "file", "not empty")
    strange = tmp_path / "strange"
    save_config(config, strange)
    CheckpointStore(strange / CHECKPOINTS).save({"something": "else"})
    refused(strange, tmp_path / "out", "no checkpoint of a training run")
    CheckpointStore(strange / CHECKPOINTS).save({"method": {"window": 1}, "began": began(config)})
    refused(strange, tmp_path / "out", "holds no actor")
    other = tmp_path / "other"
    state = made(other, config)
    weights = {name: tensor[:3] for name, tensor in state["actor"]["model"].items()}
    made(other, config, actor={**state["actor"], "model": weights})
    refused(other, tmp_path / "out", "do not fit")


def test_the_command(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    made(run, configure(home))
    assert _call(["export", str(run), str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["window"] == 2
    assert _call(["export", str(run), str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert _call(["export", str(run), str(tmp_path / "again")]) == 0
    assert "gate after 3 updates" in capsys.readouterr().out
