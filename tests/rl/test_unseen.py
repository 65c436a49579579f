"""Updates that the host does not watch: to the bit those it watches, refused where a gradient is no number, captured as
graphs in the fits of gate and critics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_critics import fitting, twins, weights
from torch import Tensor, nn

from pretended_graphs import PretendedGraphs
from taped_graphs import TapedGraphs
from tfive.errors import RunFailed
from tfive.rl.critic import BaseActivations
from tfive.rl.critics import Critics
from tfive.rl.gate import Experts, Gate
from tfive.rl.head_fit import HeadFits
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.settings import HEAD_BYTES, GateSettings, head_texts
from tfive.rl.unseen import UnseenSteps

pytestmark = pytest.mark.model
CPU = torch.device("cpu")


def layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 3).to(dtype)


def optimizer_of(model: nn.Module, **settings: Any) -> MasterOptimizer:
    return MasterOptimizer(list(model.named_parameters()), **({"lr": 1e-2, "weight_decay": 0.1} | settings))


def losses(model: nn.Module, size: float) -> list[Tensor]:
    numbers = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1))
    return [size * model(batch.to(next(model.parameters()).dtype)).square().sum() for batch in numbers]


def trained(
    step: Callable[[MasterOptimizer, Tensor], object], size: float, **settings: Any
) -> tuple[dict[str, Any], Any]:
    model = layer(settings.pop("dtype", torch.float32))
    optimizer = optimizer_of(model, **settings)
    for number in range(6):
        step(optimizer, losses(model, size)[number])
    return dict(model.state_dict()), optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 10.0], ids=["not clipped", "clipped"])
def test_an_update_that_is_not_watched_is_the_one_that_is(size: float, dtype: torch.dtype) -> None:
    steps: list[UnseenSteps] = []

    def seen_step(optimizer: MasterOptimizer, loss: Tensor) -> None:
        loss.backward()
        optimizer.step()

    def unseen(optimizer: MasterOptimizer, loss: Tensor) -> None:
        steps[:] = steps or [UnseenSteps(optimizer)]
        steps[0].step(loss)

    seen, watched = trained(seen_step, size, dtype=dtype)

    found, optimizer = trained(unseen, size, dtype=dtype)
    assert optimizer.steps == 0
    assert steps[0].settle(6) == 0
    assert (optimizer.steps, optimizer.skipped) == (watched.steps, watched.skipped) == (6, 0)
    assert all(found[name].equal(seen[name]) for name in seen)
    mine, other = (one.state_dict()["parameters"] for one in (optimizer, watched))
    for name, state in other.items():
        assert all(mine[name][key].equal(state[key]) for key in ("first", "second"))
        assert mine[name]["steps"] == state["steps"] == 6


def test_a_gradient_that_is_no_number_changes_nothing_and_is_counted() -> None:
    model = layer()
    optimizer = optimizer_of(model)
    steps = UnseenSteps(optimizer)
    for factor in (1.0, math.nan, math.inf, 1.0):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        steps.step(factor * losses(model, 1.0)[0])
        assert math.isfinite(factor) != all(model.state_dict()[name].equal(before[name]) for name in before)
    assert steps.settle(4) == 2
    assert (optimizer.steps, optimizer.skipped) == (2, 2)
    assert all(entry["steps"] == 2 for entry in optimizer.state_dict()["parameters"].values())
    assert steps.settle(0) == 0
    with pytest.raises(ValueError, match="backward first"):
        optimizer.step_unseen()


@pytest.mark.parametrize(
    "settings",
    [{"schedule": "linear", "total_steps": 9}, {"warmup_steps": 2}, {"bf16_update": "stochastic"},
     {"moments": "bfloat16"}],
)  # fmt: skip
def test_where_an_update_needs_the_host_it_is_watched(settings: dict[str, Any]) -> None:
    model = layer(torch.bfloat16)
    optimizer = optimizer_of(model, **settings)
    steps = UnseenSteps(optimizer)
    assert not steps.unseen
    for factor in (1.0, math.nan):
        steps.step(factor * losses(model, 1.0)[0])
    assert (optimizer.steps, optimizer.skipped) == (1, 1)
    assert (steps.settle(2), steps.settle(0)) == (1, 0)
    assert (optimizer.steps, optimizer.skipped) == (1, 1)


def predictions(items: int = 9) -> Experts:
    generator = torch.Generator().manual_seed(4)
    (first, second), (with_IHD, without_IHD) = (torch.randn(2, items, 3, *d, generator=generator) for d in ((), (4,)))
    mask_IH = torch.rand(items, 3, generator=generator) > 0.2
    return Experts(first, second, with_IHD, without_IHD, mask_IH, torch.arange(items))


class Kept(TapedGraphs):
    """Graphs that can be counted after they were released."""

    def __init__(self) -> None:
        super().__init__(undo=True)
        self.made, self.released = list[Any](), 0

    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Any:
        self.made.append(super().capture(work, warm_up))
        return self.made[-1]

    def release(self) -> None:
        self.released += 1
        super().release()


@pytest.mark.parametrize("broken", [False, True], ids=["sound", "one item is no number"])
def test_a_gate_is_fitted_by_replayed_steps_as_by_launched_ones(broken: bool) -> None:
    given, found, graphs = predictions(), [], Kept()
    if broken:
        given.log_with_IH[6] = math.nan
    for some in (None, graphs):
        gate = Gate(4, GateSettings(passes=3), seed=0, device=CPU, batch=2, graphs=some)
        told = [gate.fit(given, window) for window in (1, 2)]
        found.append((told, gate.state_dict()))
    (told, state), (again, other) = found
    assert again == told or (broken and all(math.isnan(one) for one in again + told))
    assert all(other["gate"][name].equal(state["gate"][name]) for name in state["gate"])
    # Of two shapes (nine items by two) the first call of each is launched, and the rest replays; one of five steps of a
    # pass meets the broken item.
    assert [graph.replays for graph in graphs.made] == [3 * 4 - 1, 3 - 1] * 2
    assert (graphs.trouble, graphs.graphs) == ("", [])
    counts = [(one["optimizer"]["steps"], one["optimizer"]["skipped"]) for one in (state, other)]
    assert counts == [(2 * 3 * (4 if broken else 5), 2 * 3 * broken)] * 2


class Breaking(Kept):
    """Graphs whose first capture breaks where the optimizer is called, as it does where memory ends there; what it
    left in tensors of its own is no number."""

    def __init__(self, error: type[RuntimeError], tries: int) -> None:
        super().__init__()
        self.error, self.tries = error, tries

    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Any:
        if not self.made and not self.trouble:
            with pytest.MonkeyPatch.context() as patched:

                def broken(self: MasterOptimizer, *given: Any) -> None:
                    for slot in self._slots:
                        if slot.gradient is not None:
                            slot.gradient.fill_(math.nan)
                    raise RuntimeError("no memory")

                patched.setattr(MasterOptimizer, "_update", broken)
                with pytest.raises(RuntimeError, match="no memory"):
                    work()
            if not self.tries:
                raise self.error("no memory")
        return super().capture(work, warm_up)


@pytest.mark.parametrize("tries", [0, 1], ids=["launched then", "captured again"])
def test_a_capture_that_breaks_leaves_no_gradient_behind(tries: int) -> None:
    graphs, found = Breaking(RuntimeError, tries), []
    for some in (None, graphs):
        gate = Gate(4, GateSettings(passes=2), seed=0, device=CPU, batch=3, graphs=some)
        found.append((gate.fit(predictions(), 1), gate.state_dict()["gate"]))
    assert found[0][0] == found[1][0]
    assert all(found[1][1][name].equal(value) for name, value in found[0][1].items())
    assert graphs.trouble == ("" if tries else "no memory")
    plain, told = fitted("head", None)
    critics, again = fitted("head", Breaking(RuntimeError, tries))
    assert again == told
    assert all(mine[name].equal(other[name]) for mine, other in zip(weights(critics), weights(plain)) for name in other)


def fitted(
    adapt: str, graphs: PretendedGraphs | None, rows: int = 3, **changes: Any
) -> tuple[Critics, list[list[float]]]:
    critics, record = twins(adapt, rows=rows, minibatches=4, **changes), fitting()
    if "sees" in changes:
        known = torch.randn(*record.mask_BRT.shape[:2], 3, generator=torch.Generator().manual_seed(9))
        record = record.having(
            no_thought_token_BRH=known, no_thought_BR=known.mean(-1), potentials_BRT=torch.zeros(record.mask_BRT.shape)
        )
    critics.fits = None if graphs is None else HeadFits(graphs)
    frozen = critics.evaluate(record).values_2BRT if "loss" in changes else None
    told = [critics.fit_pass(record, frozen, 1, number, warmup=frozen is None) for number in range(3)]
    critics.release()
    return critics, told


@pytest.mark.parametrize(
    "changes",
    [{}, {"sees": "continuation"}, {"loss": "clipped"}, {"pair": "disjoint"}, {"pair": "bracket"}],
    ids=lambda changes: "-".join(changes.values()) or "as it is",
)
def test_heads_are_fitted_by_replayed_steps_as_by_launched_ones(changes: dict[str, Any]) -> None:
    graphs = Kept()
    (plain, told), (critics, again) = fitted("head", None, **changes), fitted("head", graphs, **changes)
    assert again == told
    for mine, other in zip(weights(critics), weights(plain)):
        assert all(mine[name].equal(other[name]) for name in other)
    steps = [one.steps for one in critics.optimizers]
    assert steps == [one.steps for one in plain.optimizers]
    # Each critic of a disjoint pair has no text in one of the four minibatches.
    assert steps == ([8, 8] if "disjoint" in changes.values() else [12, 12])
    # One graph a critic (and size of minibatches) for all three passes; first calls are launched, all others replayed.
    assert not graphs.trouble
    replays = [graph.replays for graph in graphs.made]
    assert len(replays) >= 2
    assert sum(replays) + len(replays) == sum(steps)
    assert graphs.released == 1


def test_heads_read_a_step_at_once_where_the_model_below_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Kept()
    (whole, told), (critics, again) = fitted("head", None), fitted("head", graphs, rows=1)
    assert again == told
    assert all(mine[name].equal(other[name]) for mine, other in zip(weights(critics), weights(whole)) for name in other)
    assert any(graph.replays for graph in graphs.made)
    # With memory for one text at a time they are launched so, to the same numbers but for rounding.
    monkeypatch.setattr("tfive.rl.settings.HEAD_BYTES", 1)
    apart, few = fitted("head", Kept(), rows=1)
    torch.testing.assert_close(torch.tensor(few), torch.tensor(told), rtol=1e-4, atol=1e-6)
    assert apart.fits is not None
    assert not apart.fits._fits


def test_how_many_texts_heads_read_at_once() -> None:
    assert head_texts(asked=4, texts=2, states=10, width=8) == 4
    assert head_texts(asked=1, texts=50, states=4096, width=896) == HEAD_BYTES // (4096 * 896 * 12) == 24
    assert head_texts(asked=1, texts=21, states=4096, width=896) == 21


def test_both_critics_read_one_copy_of_the_activations_and_none_where_memory_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    gathered = BaseActivations.gathered

    def counted(parts: Any, size: int, index: Tensor) -> BaseActivations:
        made.append(len(index))
        if full and len(index) == 8:
            raise torch.OutOfMemoryError("no memory")
        return gathered(parts, size, index)

    monkeypatch.setattr(BaseActivations, "gathered", staticmethod(counted))
    full = False
    graphs = Kept()
    _, told = fitted("head", graphs)
    assert made == [8]
    assert len(graphs.made) == 2
    full, graphs = True, Kept()
    _, again = fitted("head", graphs)
    assert again == told
    assert not graphs.made


def test_a_new_fitting_set_gets_graphs_of_its_own() -> None:
    graphs, critics = Kept(), twins("head", rows=3, minibatches=4)
    critics.fits = HeadFits(graphs)
    records = fitting(), fitting(seed=5)
    told = [critics.fit_pass(record, None, 1, 0, warmup=True) for record in (records[0], records[1], records[1])]
    assert len(graphs.made) == 4
    plain = twins("head", rows=3, minibatches=4)
    assert told == [plain.fit_pass(record, None, 1, 0, warmup=True) for record in (records[0], records[1], records[1])]


def test_critics_with_blocks_of_their_own_are_launched() -> None:
    graphs = Kept()
    (plain, told), (critics, again) = fitted("top", None), fitted("top", graphs)
    assert again == told
    assert not graphs.made
    assert [one.steps for one in critics.optimizers] == [one.steps for one in plain.optimizers]


def test_a_head_that_diverges_in_a_later_step_is_told() -> None:
    critics, record = twins("head", rows=3, minibatches=4), fitting()
    critics.fits = HeadFits(Kept())
    last = critics._minibatches(8, 2, 0)[-1]
    returns = record.need("returns_BRT").clone()
    returns[last] = math.nan
    with pytest.raises(RunFailed, match=r"critic 1 diverged in window 2: its gradient is not finite"):
        critics.fit_pass(record.having(returns_BRT=returns), None, 2, 0, warmup=True)
    assert (critics.optimizers[0].steps, critics.optimizers[0].skipped) == (3, 1)
