"""The memory that a run needs: activations against autograd, states and weights by hand, cheaper choices."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tiny
from stage import Tally, corpus_of
from tfive.config.config import Config
from tfive.models.load import load_model
from tfive.models.shape import ModelShape, find_shape, shape_from
from tfive.rl.adapters import adapt_actor
from tfive.rl.settings import ActorSettings
from tfive.training.build import build
from tfive.training.memory import estimate, nodes_of, readable_bytes, trained_by_actor
from tfive.training.memory_recurrent import Nodes
from tfive.training.save_memory import checkpoint_bytes
from tfive.training.state_tree import encode
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts
from tfive.tree.low_rank import trained_state
from tfive.tree.settings import EngineOptions

FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 64},
    "qwen3_5_text": {
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}


def saved_bytes(
    model: PreTrainedModel, texts: TextBatch, thoughts: Thoughts, plan: ThoughtPlan, engine: EngineOptions
) -> int:
    """Bytes autograd keeps for the backward of one pass over trunk and thoughts, the weights left out."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tree = TreeModel(model, plan, engine)
    assert (tree.training.forwards is not None) == (engine.fused_training == "on")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tree.features(texts, thoughts)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def kept_and_estimated(family: str, dtype: torch.dtype, trained: str) -> tuple[int, int]:
    """Bytes a small model keeps for a backward pass, and how many are reckoned; `trained`: by its own blocks, by these
    with low-rank updates, or by few kernels."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    settings = AutoConfig.for_model(family, **sizes, **heads, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(settings).to(dtype)
    if trained == "low rank":
        adapt_actor(model, ActorSettings(adapt="lora", lora_rank=4), seed=0)
    rows, branches, steps, length = 1, 6, 12, 256
    texts = TextBatch(
        torch.full((rows, length), 5),
        torch.zeros(rows, length, dtype=torch.long),
        torch.arange(1, branches + 1).repeat(rows, 1) * 33,
        torch.arange(branches).repeat(rows, 1),
    )
    whole = torch.ones(rows, branches, dtype=torch.bool)
    thoughts = Thoughts(
        torch.full((rows, branches, steps), 6),
        torch.full((rows, branches), steps),
        whole,
        ~whole,
        torch.zeros(rows, branches, steps),
    )
    kernels = trained == "few kernels"
    engine = EngineOptions(fused_blocks="on", fused_training="on") if kernels else EngineOptions()
    measured = saved_bytes(model, texts, thoughts, ThoughtPlan(open_ids=(1,), close_ids=(2,)), engine)

    overrides = [f"text.sequence_length={length}", f"text.positions.per_text={branches}", "run.texts_per_pass=1"]
    overrides += [f"model.compute={str(dtype).removeprefix('torch.')}"]
    config = Config.load("qwen3.5-2b", overrides=overrides)
    shape = shape_from(settings.to_dict(), "here")
    critic = next(row for row in estimate(config, shape, on_gpu=kernels).rows if row.role == "critic 1")
    return measured, critic.bytes["activations"]


@pytest.mark.model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_estimated_activations_are_those_autograd_keeps(family: str, dtype: torch.dtype) -> None:
    measured, estimated = kept_and_estimated(family, dtype, "own blocks")
    assert estimated == pytest.approx(measured, rel=0.2)


@pytest.mark.model
@pytest.mark.parametrize("family", FAMILIES)
def test_low_rank_updates_keep_no_more_than_is_reckoned(family: str) -> None:
    """Frozen weights need fewer activations: a tenth fewer, with PyTorch's delta rule a fifth."""
    measured, estimated = kept_and_estimated(family, torch.bfloat16, "low rank")
    assert measured <= estimated <= 1.3 * measured


@pytest.mark.model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_estimated_activations_are_those_few_kernels_keep(family: str, dtype: torch.dtype) -> None:
    measured, estimated = kept_and_estimated(family, dtype, "few kernels")
    # Masked attention copies its outputs once more, which tiles on a GPU do not: 4 layers, 4 heads of 32 or 64.
    copied = 4 * (256 + 6 * 13) * 4 * (64 if family == "qwen3" else 32) * dtype.itemsize
    assert estimated + copied == pytest.approx(measured, rel=0.05)


def small(**changes: Any) -> ModelShape:
    shape = find_shape("SmolLM2-135M-Instruct")
    assert shape is not None
    return replace(shape, **changes)


def test_node_counts_follow_the_layout() -> None:
    nodes = Nodes(texts=2, S=100, P=3, R=6, T=4, K=2, H=5, delimiter=1)
    assert nodes.path == 100 + 3 * 64 + 6 * 16
    assert nodes.policy == 100 + 6 * (1 + 4)
    assert nodes.score == nodes.policy + 6 * 2 * (1 + 5 - 1)


def test_memory_of_a_t5_run_adds_up_by_hand() -> None:
    config = Config.load("qwen3-1.7b")
    shape = find_shape(config.model.name)
    assert shape is not None
    table = estimate(config, shape, on_gpu=True)
    rows = {row.role: row.bytes for row in table.rows}
    assert set(rows) == {"frozen base", "actor", "rollout and scoring", "critic 1", "critic 2"}
    count = shape.parameters
    assert (rows["actor"]["weights"], rows["actor"]["moments"], rows["actor"]["gradients"]) == (
        6 * count,
        8 * count,
        4 * count,
    )
    assert rows["frozen base"]["weights"] == 2 * count
    # Copies of the projections from the residual stream: queries, keys and values, gate and up.
    assert rows["rollout and scoring"]["weights"] == 28 * 2048 * (16 * 128 + 2 * 8 * 128 + 2 * 6144) * 2
    nodes = nodes_of(config)
    keys_and_values = 28 * 2 * 8 * 128
    # Batches of 8 texts, and 4 at the end of the probe's.
    assert rows["rollout and scoring"]["states"] == (8 + 4) * nodes.policy * keys_and_values * 2
    lasting = sum(row[column] for row in rows.values() for column in ("weights", "moments", "states"))
    transient = max(row["gradients"] + row["activations"] for row in rows.values())
    assert (table.lasting, table.transient, table.total) == (lasting, transient, lasting + transient)
    for row in table.rows:
        assert {column for column, amount in row.bytes.items() if amount} == set(row.how)


def test_hybrids_keep_recurrent_states() -> None:
    config = Config.load("qwen3.5-2b")
    shape = find_shape(config.model.name)
    assert shape is not None
    rows = {row.role: row for row in estimate(config, shape, on_gpu=True).rows}
    # 18 linear layers, 16 heads of 128 × 128 at each of 16 positions; of 13 places of each branch the convolution's
    # inputs (and three before), a key, and in float32 a write and a decay a head.
    place = 2 * 16 * 128 + 4 * (16 * 128 + 16)
    recurrent = 4 * 16 * 18 * (2 * 16 * 128 * 128 + 16 * 2 * 3 * 16 * 128 + 13 * place)
    attention = 4 * nodes_of(config).policy * (6 * 2 * 2 * 256) * 2
    assert rows["rollout and scoring"].bytes["states"] == recurrent + attention
    # By PyTorch's step: states, keys and writes in float32.
    plain = Config.load("qwen3.5-2b", overrides=["engine.fast=off"])
    rows = {row.role: row for row in estimate(plain, shape, on_gpu=True).rows}
    recurrent = 4 * 16 * 18 * (16 * 128 * 128 + 13 * 2 * 16 * 128) * 4
    assert rows["rollout and scoring"].bytes["states"] == recurrent + attention


def test_shards_are_trained_by_pytorchs_rule() -> None:
    shape = find_shape("Qwen/Qwen3.5-2B-Base")
    assert shape is not None

    def kept(*overrides: str) -> dict[str, str]:
        rows = estimate(Config.load("qwen3.5-2b", overrides=overrides), shape, on_gpu=True).rows
        return {row.role: row.how["activations"] for row in rows if "activations" in row.how}

    assert all("by kernels" in kept()[role] for role in ("actor", "critic 1", "rollout and scoring"))
    shards = kept("distributed.shard=0")
    assert "path tokens" in shards["actor"]
    assert "path tokens" in shards["critic 1"]
    assert "by kernels" in shards["rollout and scoring"]


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        (["method=base"], {"model"}),
        (["method=ntp"], {"actor"}),
        (["method=quiet-star-ppo"], {"actor", "rollout and scoring", "critic 1"}),
        (["method=rlp", "thought.group=8"], {"actor", "rollout and scoring", "EMA teacher"}),
        (
            ["critic.adapt=head"],
            {"actor", "rollout and scoring", "features for critics (of the frozen base)", "critic 1", "critic 2"},
        ),
    ],
)
def test_each_method_has_its_roles(overrides: list[str], roles: set[str]) -> None:
    config = Config.load("qwen3-1.7b", overrides=overrides)
    assert {row.role for row in estimate(config, small(), on_gpu=True).rows} == roles | {"frozen base"}


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=base"],
        ["method=quiet-star-ppo", "critic.adapt=full"],
        ["method=t5", "critic.adapt=full", "calibration.score_centering=true"],
        ["method=t5", "critic.adapt=top"],
        ["method=t5", "actor.adapt=lora", "critic.adapt=lora", "calibration.score_centering=true"],
        ["method=rlp", "actor.adapt=lora", "actor.lora_targets=mlp"],
    ],
    ids=["base", "one full critic", "two full critics and the old policy", "top blocks", "updates of all", "of some"],
)
def test_estimated_weights_are_those_that_a_run_holds(overrides: list[str], tmp_path: Path) -> None:
    config = tiny.configure(tmp_path, "model.compute=bfloat16", *overrides)
    wider = AutoConfig.from_pretrained(
        config.model.name, hidden_size=128, head_dim=64, intermediate_size=256, num_hidden_layers=8
    )
    AutoModelForCausalLM.from_config(wider).save_pretrained(config.model.name)
    loaded = load_model(config.model.name, device="cpu", dtype=torch.bfloat16)
    corpus = corpus_of(config, loaded=loaded)
    before = storages()
    run = build(config, loaded, corpus, Tally())
    own = {parameter.untyped_storage().data_ptr() for parameter in loaded.model.parameters()}
    made = {place: size for place, (size, _) in storages().items() if place in own or place not in before}
    shape = find_shape(str(run.config.model.name))
    assert shape is not None
    table = estimate(run.config, shape, on_gpu=False)
    estimated = sum(row.bytes["weights"] for row in table.rows)
    if "method=rlp" in overrides:
        estimated -= next(row.bytes["weights"] for row in table.rows if row.role == "EMA teacher") // 2  # not begun
    assert sum(made.values()) == pytest.approx(estimated, rel=0.05)  # small heads are left out
    saved = encode({"method": {**run.method.state_dict(), "gate": None}}).pieces
    copied = checkpoint_bytes(table, run.config, shape) - sum(row.bytes["moments"] for row in table.rows)  # not begun
    if "method=rlp" in overrides:
        copied -= 4 * trained_by_actor(run.config, shape)[0]
    assert sum(piece.local.nbytes for piece in saved) == pytest.approx(copied, rel=0.05)


def storages() -> dict[int, tuple[int, torch.Tensor]]:
    """Bytes of all tensors' memory by address; the tensors are held, so that no address is used again."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = (storage.nbytes(), thing)
    return found


def test_next_token_training_reads_no_thoughts() -> None:
    def activations(*overrides: str) -> int:
        rows = estimate(Config.load("qwen3-1.7b", overrides=overrides), small(), on_gpu=True).rows
        return next(row.bytes["activations"] for row in rows if row.role == "actor")

    assert activations("method=ntp") == activations("method=ntp", "thought.length=64", "thought.checkpoints=[64]")
    assert activations("method=ntp") < activations("method=anchor-only", "anchor.conditioned=1")


def test_cheaper_choices_cost_less() -> None:
    def total(*overrides: str) -> int:
        return estimate(Config.load("qwen3-1.7b", overrides=overrides), small(), on_gpu=True).total

    full = total()
    assert total("critic.adapt=top") < full
    assert total("critic.adapt=lora") < total("critic.adapt=top")
    assert total("critic.adapt=head") < total("critic.adapt=lora")
    assert total("engine.activation_checkpointing=true") < full
    assert total("run.texts_per_pass=2") < full
    assert total("optimizer.bf16_update=stochastic") < full
    assert total("optimizer.moments=bfloat16") < full
    assert total("actor.adapt=lora") < total("optimizer.moments=bfloat16", "optimizer.bf16_update=stochastic")
    assert total("actor.adapt=lora", "actor.lora_targets=mlp") < total("actor.adapt=lora")


def test_activations_are_kept_for_critics_where_they_come_with_the_sets() -> None:
    def features(*overrides: str) -> dict[str, str]:
        asked = ("critic.adapt=probe", "anchor.conditioned=1", *overrides)
        rows = estimate(Config.load("qwen3-1.7b", overrides=asked), small(), on_gpu=True).rows
        return next(row.how for row in rows if row.role.startswith("features for critics"))

    alone = features()["activations"]
    assert alone.startswith("features ")
    assert "lower" not in alone
    assert "lower features" in features("critic.features=policy")["activations"]
    assert features("critic.features=policy", "thought.reading=gated", "window.reading=1")["activations"] == alone


def test_a_rate_of_the_anchors_own_has_moments_of_its_own() -> None:
    def moments(*overrides: str) -> int:
        rows = estimate(Config.load("qwen3-1.7b", overrides=overrides), small(), on_gpu=True).rows
        return next(row.bytes["moments"] for row in rows if row.role == "actor")

    assert moments("anchor.lr=1e-6") == 2 * moments() == 16 * small().parameters
    assert moments("anchor.lr=1e-6", "optimizer.moments=bfloat16") == moments()


def test_gradients_of_a_step_of_one_pass_take_the_place_of_activations() -> None:
    def row(*overrides: str) -> dict[str, int]:
        rows = estimate(Config.load("qwen3-1.7b", overrides=overrides), small(), on_gpu=True).rows
        return next(one.bytes for one in rows if one.role == "actor")

    several, one = row("run.texts_per_pass=16"), row("run.texts_per_pass=16", "window.items=1024")
    assert one["activations"] == several["activations"]
    assert several["gradients"] == 4 * small().parameters
    assert one["gradients"] == max(0, 4 * small().parameters - one["activations"])


@pytest.mark.parametrize("targets", ["all", "attention", "mlp"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_counted_low_rank_updates_are_those_a_model_gets(family: str, targets: Any) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    settings = AutoConfig.for_model(family, **sizes, **heads, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(settings)
    adapt_actor(model, ActorSettings(adapt="lora", lora_rank=3, lora_targets=targets), seed=0)
    overrides = ["actor.adapt=lora", "actor.lora_rank=3", f"actor.lora_targets={targets}"]
    table = estimate(
        Config.load("qwen3.5-2b", overrides=overrides), shape_from(settings.to_dict(), "here"), on_gpu=True
    )
    actor = next(row for row in table.rows if row.role == "actor")
    assert actor.bytes["weights"] == 4 * sum(value.numel() for value in trained_state(model).values())


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (2048, "2.00 KiB"), (3 * 2**20, "3.00 MiB"), (2**30, "1.00 GiB")]
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert readable_bytes(count) == text
