"""Shapes of models from configuration files and stored facts, and the parameters that they count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tfive.errors import UserError
from tfive.models.shape import find_shape, known_shapes, shape_from


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(known_shapes()))
def test_stored_shapes_count_parameters_as_transformers_does(name: str) -> None:
    facts = dict(known_shapes()[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(facts.pop("model_type"), **facts))
    shape = find_shape(f"somebody/{name}")
    assert shape is not None
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.backbone == sum(parameter.numel() for parameter in model.model.parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [("SmolLM2-135M-Instruct", 0.1345), ("Qwen3.5-2B-Base", 1.88), ("Qwen3.5-9B-Base", 8.95)],
)
def test_stored_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    shape = find_shape(name)
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_local_config_comes_before_stored_facts(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3.5-2B-Base"
    folder.mkdir()
    facts = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 10,
    }
    (folder / "config.json").write_text(json.dumps({"text_config": facts, "tie_word_embeddings": True}))
    shape = find_shape(str(folder))
    assert shape is not None
    assert (shape.hidden, shape.layers, shape.linear_layers, shape.kv_heads, shape.tied) == (8, 2, 0, 2, True)
    assert shape.source.endswith("config.json")


def test_unusable_configs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        find_shape(str(tmp_path))
    with pytest.raises(UserError, match="no usable model shape"):
        shape_from({"hidden_size": 8}, "here")
    assert find_shape("nobody/knows-this") is None


def test_top_blocks_run_from_one_block_to_all() -> None:
    shape = find_shape("Qwen3-1.7B-Base")
    assert shape is not None
    assert shape.top_blocks(1) == shape.attention_block + shape.hidden
    assert shape.top_blocks(99) == shape.backbone - shape.embedding
