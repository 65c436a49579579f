"""Tree equals plain in log-probabilities, losses, values and parameter gradients; and mistakes would show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from cases import Case, cases, lifted, random_case
from exact import Numbers, by_plain, by_tree, differences
from families import DENSE, HYBRID, VOCABULARY, WINDOWED, tiny
from hypothesis import HealthCheck, given, settings
from transformers import PreTrainedModel

from tfive.tree import reader, scoring
from tfive.tree.grow import grow
from tfive.tree.layout import CLOSE, TEXT, Layout
from tfive.tree.settings import Attention, EngineOptions

pytestmark = pytest.mark.model

some = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("family", DENSE + WINDOWED + HYBRID)
@given(case=cases())
@some
def test_exact_in_float64_with_lifted_casts(family: str, case: Case) -> None:
    model = tiny(family)
    with lifted():
        found = differences(by_tree(model, case), by_plain(model, case))
    assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("family", DENSE + WINDOWED)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_stock_modules(family: str, dtype: torch.dtype, bound: float) -> None:
    case = random_case(11, "text2", variable=True, group=2)
    model = tiny(family, dtype)
    found = differences(by_tree(model, case), by_plain(model, case))
    assert max(found.values()) < bound, found


@pytest.mark.parametrize("kind", ["none", "text", "text3", "learned"])
@pytest.mark.parametrize("attention", ["sdpa", "folded"])
def test_both_kernels_with_every_delimiter(kind: str, attention: Attention) -> None:
    case = random_case(4, kind, variable=kind == "learned", group=2)
    model = tiny("qwen3")
    with lifted():
        tree = by_tree(
            model, case, engine=EngineOptions(attention=attention, head_bytes=7 * 4 * VOCABULARY, max_nodes=40)
        )
        found = differences(tree, by_plain(model, case))
    assert max(found.values()) < 1e-9, found


def test_flex_attention_forward() -> None:
    case = random_case(5, "text2", variable=True)
    model = tiny("llama")
    with lifted(), torch.no_grad():
        tree = by_tree(model, case, slopes=False, engine=EngineOptions(attention="flex"))
        found = differences(tree, by_plain(model, case, slopes=False))
    assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_5"])
def test_recomputed_activations_change_nothing(family: str) -> None:
    case = random_case(6, "text2", group=2)
    model = tiny(family)
    kept = by_tree(model, case)
    again = by_tree(model, case, engine=EngineOptions(activation_checkpointing=True))
    assert max(differences(again, kept).values()) < 1e-12


def _branch_nodes(layout: Layout) -> torch.Tensor:
    return layout.kind_BN > TEXT


def _sees_one_more(layout: Layout) -> Layout:
    return replace(layout, trunk_limit_BN=layout.trunk_limit_BN + _branch_nodes(layout).long())


def _sees_one_less(layout: Layout) -> Layout:
    return replace(layout, trunk_limit_BN=layout.trunk_limit_BN - _branch_nodes(layout).long())


def _positions_one_further(layout: Layout) -> Layout:
    return replace(layout, position_BN=layout.position_BN + _branch_nodes(layout).long())


def _forked_one_step_early(layout: Layout) -> Layout:
    scoring = (layout.kind_BN >= CLOSE).long()
    return replace(layout, step_limit_BN=layout.step_limit_BN - scoring, position_BN=layout.position_BN - scoring)


@cache
def _right(family: str) -> tuple[PreTrainedModel, Case, Numbers]:
    case = random_case(8, "text2", count=4)
    return tiny(family), case, by_plain(tiny(family), case)


ALL = ("log_prob", "value", "loss", "token_loss", "∂log_prob", "∂value", "∂conditioned")
SCORED = ("loss", "token_loss", "∂conditioned")


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize(
    ("mutate", "moved"),
    [
        (_sees_one_more, ALL),
        (_sees_one_less, ALL),
        (_positions_one_further, ALL),
        (_forked_one_step_early, SCORED),
    ],
)
def test_mistakes_miss_every_bound_a_hundredfold(
    family: str, mutate: Callable[[Layout], Layout], moved: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, case, right = _right(family)
    for module in (reader, scoring):
        monkeypatch.setattr(module, "grow", lambda *args: mutate(grow(*args)))
    found = differences(by_tree(model, case), right)
    assert min(found[name] for name in moved) > 100 * 1e-4, found
