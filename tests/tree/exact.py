"""Everything the engine computes next to the plain reference, as numbers to compare."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import Case
from plain import PlainModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.settings import EngineOptions


class StepValue(nn.Module):
    """A value head that knows the step."""

    def __init__(self, features: int, steps: int, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.weight_DT = nn.Parameter(torch.randn(features, steps, generator=draw, dtype=torch.float64).to(dtype))

    def forward(self, features: Tensor, step: Tensor) -> Tensor:
        return (features * self.weight_DT.t()[step]).sum(-1)


@dataclass
class Numbers:
    """One side's results: flat vectors by name, and parameter gradients of a fixed scalar of each kind."""

    values: dict[str, Tensor]
    slopes: dict[str, dict[str, Tensor]]


def _slopes(total: Tensor, modules: list[nn.Module]) -> dict[str, Tensor]:
    named = {f"{i}.{n}": p for i, m in enumerate(modules) for n, p in m.named_parameters()}
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found)}


def _weighted(vector: Tensor) -> Tensor:
    """A scalar that tells entries apart."""
    return (vector * torch.arange(1, len(vector) + 1, dtype=vector.dtype).cos()).sum()


def _parts(model: PreTrainedModel, case: Case) -> tuple[Delimiters | None, StepValue]:
    delimiters = None
    if case.plan.learned:
        delimiters = Delimiters.from_model(model, case.plan).to(model.dtype)
        with torch.no_grad():
            delimiters.weight_2D.add_(0.2)
    return delimiters, StepValue(model.config.hidden_size, case.plan.length, model.dtype)


def by_tree(model: PreTrainedModel, case: Case, slopes: bool = True, engine: EngineOptions | None = None) -> Numbers:
    delimiters, head = _parts(model, case)
    tree = TreeModel(model, case.plan, engine, delimiters)
    texts, thoughts = case.texts, case.thoughts
    out = tree.policy(texts, thoughts, entropy=True, text=True, continuations=True)
    scores, mask = tree.score(texts, thoughts), out.mask_BRT
    values = tree.values(texts, thoughts, head)[mask]
    numbers = {
        "log_prob": out.need("log_prob_BRT")[mask],
        "entropy": out.need("entropy_BRT")[mask],
        "value": values,
        "no_thought": scores.no_thought_BR[thoughts.valid_BR],
        "loss": scores.losses_BRK[scores.mask_BRK],
        "token_loss": scores.token_BRH[scores.token_mask_BRH],
        "conditioned": -out.need("continuation_log_prob_BRH").sum()[None],
        "text": -out.need("text_log_prob_BS").sum()[None],
    }
    return _numbers(numbers, slopes, [m for m in (model, delimiters, head) if m is not None])


def by_plain(model: PreTrainedModel, case: Case, slopes: bool = True) -> Numbers:
    delimiters, head = _parts(model, case)
    reference = PlainModel(model, case.plan, None if delimiters is None else delimiters.weight_2D)
    found = reference(case.texts, case.thoughts)
    values = [head(f, torch.arange(len(f))) for f in found.features]
    numbers = {
        "log_prob": torch.cat(found.log_prob),
        "entropy": torch.cat(found.entropy),
        "value": torch.cat(values),
        "no_thought": torch.stack(found.no_thought),
        "loss": torch.stack([loss for losses in found.losses for loss in losses.values()]),
        "token_loss": torch.cat(found.conditioned),
        "conditioned": torch.cat(found.conditioned).sum()[None],
        "text": reference.text_loss(case.texts)[None],
    }
    return _numbers(numbers, slopes, [m for m in (model, delimiters, head) if m is not None])


def _numbers(numbers: dict[str, Tensor], slopes: bool, modules: list[nn.Module]) -> Numbers:
    kinds = ("log_prob", "entropy", "value", "conditioned", "text") if slopes else ()
    found = {k: _slopes(_weighted(numbers[k]), modules) for k in kinds if numbers[k].requires_grad}
    return Numbers({k: v.detach() for k, v in numbers.items()}, found)


def apart(some: Tensor, other: Tensor) -> float:
    """Largest difference relative to the largest entry."""
    if some.numel() == 0:
        return 0.0
    some, other = some.detach().double(), other.detach().double()
    return float((some - other).abs().max() / other.abs().max().clamp(min=1e-12))


def differences(tree: Numbers, plain: Numbers) -> dict[str, float]:
    """Relative differences by name; gradients as `∂name`, each parameter measured against the largest gradient."""
    assert tree.values.keys() == plain.values.keys()
    found = {}
    for name, value in plain.values.items():
        assert tree.values[name].shape == value.shape, name
        found[name] = apart(tree.values[name], value)
    for name, slopes in plain.slopes.items():
        scale = max(float(s.double().abs().max()) for s in slopes.values())
        worst = max(float((tree.slopes[name][p].double() - s.double()).abs().max()) for p, s in slopes.items())
        found[f"∂{name}"] = worst / max(scale, 1e-12)
    return found
