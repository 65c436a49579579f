"""What branches share: the text is read once, its state at a position is made once, whatever the group."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from test_deltanet import CASES, PLAN, gradients, in_tree, make_case, off, tiny_model, worst
from torch import Tensor

from tfive.tree.fast.delta_kernel import KernelRule
from tfive.tree.grow import grow
from tfive.tree.hf import recurrent_parts
from tfive.tree.layout import Layout
from tfive.tree.recurrent.delta_rule import DeltaTrace, read_paths
from tfive.tree.recurrent.deltanet import DeltaRule, RecurrentParts, StepRecurrence, TreeRecurrence

pytestmark = pytest.mark.model
ROWS, WIDTH, POSITIONS = 2, 130, [[3, 63, 64, 100], [0, 40, 99, 120]]


@dataclass
class Ledger:
    """How much of the rule was computed: paths and tokens of every reading, and how many states were asked for."""

    readings: list[tuple[int, int]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)

    def rule(self, *inputs: Any, **options: Any) -> tuple[Tensor, _Counted]:
        """Our rule, counted."""
        output, trace = read_paths(*inputs, **options)
        self.readings.append((inputs[0].shape[0], inputs[0].shape[1]))
        return output, _Counted(trace, self.states)

    def kernel(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """A stand-in for a kernel, which gives a path's final state alone, counted."""
        paths, length = inputs[0].shape[:2]
        output, trace = read_paths(*inputs)
        self.readings.append((paths, length))
        return output, trace.state_after(torch.arange(paths), torch.full((paths,), length))


@dataclass
class _Counted:
    trace: DeltaTrace
    states: list[int]

    def state_after(self, path_X: Tensor, count_X: Tensor) -> Tensor:
        self.states.append(len(path_X))
        return self.trace.state_after(path_X, count_X)


def _layout(group: int, segments: str) -> Layout:
    case = make_case([[WIDTH]] * ROWS, POSITIONS, replace(PLAN, group=group))
    return grow(case.texts, case.plan, case.thoughts, segments)


def _mix(layout: Layout, rule: DeltaRule) -> None:
    hidden = torch.randn(ROWS, layout.node_count, 32, dtype=torch.float64)
    TreeRecurrence(layout, rule).mix(_parts(), hidden)


def _parts() -> RecurrentParts:
    return recurrent_parts(tiny_model().model.layers[0].linear_attn)


@pytest.mark.parametrize("group", [1, 8])
def test_every_node_is_read_once(group: int) -> None:
    ledger, layout = Ledger(), _layout(group, "all")
    _mix(layout, ledger.rule)
    forks, branches, checkpoints = ROWS * 4, ROWS * 4 * group, len(PLAN.checkpoints)
    thoughts, segments = (branches, layout.thought_width), (branches * checkpoints, layout.segment_width)
    assert ledger.readings == [(ROWS, WIDTH), thoughts, segments]
    assert sum(paths * tokens for paths, tokens in ledger.readings) == ROWS * layout.node_count
    assert ledger.states == [forks, branches * checkpoints]


@pytest.mark.parametrize("group", [1, 8])
def test_a_kernel_reads_up_to_a_position_once_for_the_group(group: int) -> None:
    ledger, layout = Ledger(), _layout(group, "all")
    _mix(layout, KernelRule(ledger.kernel))
    forks, branches, checkpoints = ROWS * 4, ROWS * 4 * group, len(PLAN.checkpoints)
    paths = [*[ROWS] * 3, forks, branches, branches * checkpoints, branches * checkpoints]
    assert ledger.readings == [(count, 64) for count in paths]


def test_sampling_and_scoring_begin_where_the_reading_ended() -> None:
    case = make_case([[WIDTH]] * ROWS, POSITIONS, replace(PLAN, group=8))
    trunk, parts, ledger = grow(case.texts, case.plan), _parts(), Ledger()
    reading = TreeRecurrence(trunk, ledger.rule, case.texts.positions_BP, keep=True)
    with torch.no_grad():
        reading.mix(parts, torch.randn(ROWS, WIDTH, 32, dtype=torch.float64))
    assert (ledger.readings, ledger.states) == ([(ROWS, WIDTH)], [ROWS * 4])

    steps = StepRecurrence(reading.memory, ROWS * 4 * 8, PLAN.open_width + PLAN.length)
    assert [len(layer.state_XIEF) for layer in steps.layers.values()] == [ROWS * 4]

    later, scored = Ledger(), grow(case.texts, case.plan, case.thoughts, "all")
    own = scored.node_count - scored.trunk_width
    with torch.no_grad():
        TreeRecurrence(scored, later.rule, case.texts.positions_BP, reading.memory).mix(
            parts, torch.randn(ROWS, own, 32, dtype=torch.float64)
        )
    assert sum(paths * tokens for paths, tokens in later.readings) == ROWS * own


def test_a_kernel_passes_gradients_through_shared_forks() -> None:
    model, case = tiny_model(), CASES["groups anywhere"]
    probe = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    mine, kernels = (in_tree(model, case, probe, rule) for rule in (read_paths, KernelRule(Ledger().kernel)))
    assert worst(kernels, mine) < 1e-9
    want, got = (gradients(model, readings.objective()) for readings in (mine, kernels))
    assert max(off(got[n], g) for n, g in want.items()) < 1e-9
