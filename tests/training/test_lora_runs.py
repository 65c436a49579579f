"""Runs whose actor has low-rank updates: every method, one copy of what is frozen, checkpoints of updates, exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from stage import assembled
from tfive.errors import UserError
from tfive.inference.thought_model import ThoughtModel
from tfive.models.load import load_model
from tfive.rl.qualify import Qualifier
from tfive.training import start
from tfive.training.build import Assembly
from tfive.training.checkpoint import CheckpointStore
from tfive.training.export import export, export_command
from tfive.training.run_folder import CHECKPOINTS
from tfive.training.state_tree import decode, encode
from tfive.tree.low_rank import low_rank_parts, trained_state
from tiny import configure

pytestmark = pytest.mark.model
LORA = ("actor.adapt=lora", "actor.lora_rank=2", "critic.adapt=lora", "critic.lora_rank=2", "optimizer.lr=1e-2")
ROW = torch.arange(1, 30)[None]


@pytest.fixture(autouse=True)
def critics_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # Critics of this size qualify by luck alone; here it only matters that the actor moves.
    monkeypatch.setattr(Qualifier, "_criterion", lambda *_: (True, "let through"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def window(run: Assembly) -> None:
    run.method.advance()
    while not run.method.closed:
        run.method.advance()


def models_of(run: Assembly) -> list[nn.Module]:
    """Every module of a run that has weights of the model in it."""
    found: list[nn.Module] = [run.actor.engine.model, run.base.model, *(run.critics.critics if run.critics else ())]
    if run.actor.centring is not None:
        found.append(run.actor.centring.old.model)
    teacher = getattr(run.method.parts, "teacher", None)
    return found if teacher is None else [*found, teacher.engine.model]


METHODS = ("ntp", "anchor-only", "quiet-star-ppo", "quiet-star-grpo", "rlp", "t5")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_updates_of_weights_that_stay(method: str, home: Path) -> None:
    more = ("calibration.score_centering=true",) if method == "t5" else ()
    run = assembled(home, *LORA, f"method={method}", *more)
    before = {name: weight.clone() for name, weight in run.base.model.named_parameters()}
    window(run)
    assert all(before[name].equal(weight) for name, weight in run.base.model.named_parameters())
    assert any(part.up.any() for _, part in low_rank_parts(run.actor.engine.model))
    whole = {weight.untyped_storage().data_ptr(): weight for one in models_of(run) for weight in one.parameters()}
    frozen = {place: weight for place, weight in whole.items() if not weight.requires_grad}
    of_base = {weight.untyped_storage().data_ptr() for weight in run.base.model.parameters()}
    # What else is frozen is the teacher's or the old policy's own copy of the updates.
    own = {weight.shape for weight in trained_state(run.actor.engine.model).values()}
    assert of_base <= frozen.keys()
    assert all(place in of_base or weight.shape in own for place, weight in frozen.items())
    copies = (method == "rlp") + (method == "t5")
    assert len(frozen) == len(of_base) + copies * len(trained_state(run.actor.engine.model))


@pytest.mark.parametrize("method", ["t5", "rlp"])
def test_a_run_goes_on_bit_for_bit_from_its_updates_alone(method: str, home: Path) -> None:
    settings = (
        *LORA,
        f"method={method}",
        "thought.reading=gated",
        "anchor.conditioned=1",
        "optimizer.moments=bfloat16",
    )
    one, other = (assembled(home, *settings) for _ in range(2))
    window(one)  # opens the gates; the next one is rewarded
    window(one)
    encoded = encode(one.method.state_dict())
    saved = decode(json.loads(json.dumps(encoded.document)), [piece.local.clone() for piece in encoded.pieces])
    assert set(saved["actor"]["model"]) == set(trained_state(one.actor.engine.model))
    if method == "rlp":
        averaged = set(saved["teacher"]["average"])
        assert averaged == set(saved["actor"]["model"])
    other.method.load_state_dict(saved)
    other.ledger.load_state_dict(one.ledger.state_dict())
    for run in (one, other):
        window(run)
    for name, value in one.actor.engine.model.state_dict().items():
        assert value.equal(other.actor.engine.model.state_dict()[name]), name


@pytest.mark.parametrize("reading", ["inline", "gated"])
@pytest.mark.parametrize("adapt", ["full", "lora"])
def test_recomputed_blocks_train_the_same_bits(adapt: str, reading: str, home: Path) -> None:
    settings = (f"actor.adapt={adapt}", f"thought.reading={reading}", "anchor.conditioned=1", "method=anchor-only")
    found: list[dict[str, Tensor]] = []
    for recompute in ("false", "true"):
        run = assembled(home, *settings, f"engine.activation_checkpointing={recompute}")
        window(run)
        found.append(trained_state(run.actor.engine.model))
    assert found[0].keys() == found[1].keys()
    assert all(value.equal(found[1][name]) for name, value in found[0].items())


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    start.train(configure(home, *LORA, "method=anchor-only", "window.windows=1"), home / "run", quiet=True)
    return home / "run"


def test_a_finished_run_has_moved_and_stores_updates_alone(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text("utf-8"))
    assert summary["problems"] == []
    assert 1e-7 < summary["weight_change"] < 1
    found = CheckpointStore(trained / CHECKPOINTS).newest()
    assert found.checkpoint is not None
    names = found.checkpoint.tree["method"]["actor"]["model"]
    assert names
    assert all(name.endswith((".up", ".down")) for name in names)


def test_exports_merged_or_as_an_adapter_are_the_actor(trained: Path, tmp_path: Path) -> None:
    record = export(trained, tmp_path / "merged")
    assert record["update_lost"] < 1e-3
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert ThoughtModel.from_pretrained(tmp_path / "merged", device="cpu").predict("7 river mill farm ( boat").thoughts
    said = export_command(
        str(trained), str(tmp_path / "adapter"), exact=False, untrained=False, adapter=True, as_json=False
    )
    assert "PeftModel" in said
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "README.md"
    }  # fmt: skip
    described: dict[str, Any] = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text("utf-8"))
    updates = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base = load_model(trained.parent / "model", device="cpu").model
    untouched = base(ROW).logits
    for name, narrow in updates.items():
        if name.endswith(".lora_A.weight"):
            wide = updates[name.replace("lora_A", "lora_B")]
            place = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            assert place.rpartition(".")[2] in described["target_modules"]
            layer: Any = base.get_submodule(place)
            layer.weight.data += described["lora_alpha"] / described["r"] * wide @ narrow
    torch.testing.assert_close(base(ROW).logits, merged(ROW).logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(untouched, merged(ROW).logits, atol=1e-3)


def test_what_is_no_adapter_is_refused(home: Path, tmp_path: Path) -> None:
    start.train(configure(home, "method=anchor-only", "window.windows=1"), tmp_path / "full", quiet=True)
    with pytest.raises(UserError, match="full, no adapter"):
        export(tmp_path / "full", tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()
