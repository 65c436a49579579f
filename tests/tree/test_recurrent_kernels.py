"""Recurrent layers by kernels: the plain forms of their operations compute the passes, and wrong kernels are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import lifted
from test_deltanet import CASES, EXACT, check_steps, gradients, in_tree, readings, tiny_model, worst
from torch import Tensor, nn

from tfive.errors import UserError
from tfive.tree.attention import TreePass
from tfive.tree.fast import mixer as mixing
from tfive.tree.fast.agreement import KERNEL_BOUNDS
from tfive.tree.fast.delta_kernel import choose_rule, rule_differences, triton_trouble
from tfive.tree.fast.delta_step import (
    BranchSteps,
    RecurrentHeads,
    StepWeights,
    torch_step,
)
from tfive.tree.fast.delta_step_choice import choose_step, step_differences
from tfive.tree.fast.kernel_recurrence import KernelRecurrence, finish_trouble
from tfive.tree.fast.mixer import TorchMixer, TritonMixer, mixer_differences
from tfive.tree.fast.recurrence_agreement import packed_tree, recurrence_differences
from tfive.tree.grow import grow
from tfive.tree.hf import Backbone, recurrent_parts
from tfive.tree.recurrent.delta_rule import read_paths
from tfive.tree.recurrent.deltanet import TreeRecurrence

HEADS = RecurrentHeads(1, 2, 16, 16, 3)
CPU = torch.device("cpu")


@pytest.mark.model
@pytest.mark.parametrize("name", ["packed and padded", "groups anywhere", "long delimiters", "sampled closes"])
def test_sections_by_a_mixer_equal_the_whole_pass(name: str) -> None:
    case, model = CASES[name], tiny_model()
    probe = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layout, backbone = grow(case.texts, case.plan, case.thoughts, "all"), Backbone(model)
    with lifted():
        want = in_tree(model, case, probe)
        tree = TreePass(layout, "sdpa", recurrence=KernelRecurrence(layout, read_paths, TorchMixer()))
        hidden = backbone.run(backbone.embedding(layout.token_BN), layout.position_BN, tree)
        got = readings(model, layout, hidden, probe)
        slopes, wanted = gradients(model, got.objective()), gradients(model, want.objective())
    assert worst(got, want) < EXACT
    for name, slope in slopes.items():
        torch.testing.assert_close(slope, wanted[name], rtol=1e-7, atol=1e-9)


@pytest.mark.model
def test_branches_after_a_reading_find_their_forks() -> None:
    case, module = CASES["groups"], tiny_model().model.layers[0].linear_attn
    parts = recurrent_parts(module)
    whole = grow(case.texts, case.plan, case.thoughts, "last")
    hidden = torch.randn(2, whole.node_count, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    asked = {"rule": read_paths, "mixer": TorchMixer(), "position_BP": case.texts.positions_BP}
    with torch.no_grad(), lifted():
        want = TreeRecurrence(whole, read_paths).mix(parts, hidden)[:, whole.trunk_width :]
        trunk = KernelRecurrence(grow(case.texts, case.plan), keep=True, **asked)  # type: ignore[arg-type]
        trunk.mix(parts, hidden[:, : whole.trunk_width])
        later = KernelRecurrence(whole, memory=trunk.memory, **asked)  # type: ignore[arg-type]
        got = later.mix(parts, hidden[:, whole.trunk_width :])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "window"), [("packed and padded", 64), ("groups", 64), ("groups anywhere", 2), ("sampled closes", 64)]
)
def test_steps_equal_the_whole_pass(name: str, window: int) -> None:
    for once in (False, True):

        def steps_of(memory: Any, branches: int, steps: int, parts: Any, once: bool = once) -> BranchSteps:
            return BranchSteps(memory, branches, steps, torch_step, {parts.layer: StepWeights.of(parts, once)}, window)

        check_steps(name, steps_of)


def test_a_wrong_step_is_found() -> None:
    def forgetful(products: Any, weights: Any, memory: Any, place: Tensor) -> Tensor:
        return torch_step(products, weights, memory, place.clamp(max=3))

    assert max(step_differences(torch_step, HEADS, CPU, torch.float32, 5).values()) == 0
    assert step_differences(forgetful, HEADS, CPU, torch.float32, 5)["outputs"] > 0.01
    for once in (False, True):
        assert max(step_differences(torch_step, HEADS, CPU, torch.bfloat16, 5, once).values()) < 0.02


def test_a_wrong_mixer_is_found() -> None:
    class Unmasked(TorchMixer):
        def heads(self, sequence_QLU: Tensor, taps_UJ: Tensor, heads: RecurrentHeads, document_QL: Any) -> Any:
            return super().heads(sequence_QLU, taps_UJ, heads, None)

    assert max(mixer_differences(TorchMixer(), HEADS, CPU, torch.float32).values()) == 0
    with torch.no_grad():
        apart = mixer_differences(Unmasked(), HEADS, CPU, torch.float32)
    assert apart["heads of packed documents"] > 0.01
    assert apart["heads"] == apart["gates"] == 0


class _RowByRow(TorchMixer):
    """Reads documents as a kernel does: row after row of the paths' length, whatever the strides."""

    def heads(self, sequence_QLU: Tensor, taps_UJ: Tensor, heads: RecurrentHeads, document_QL: Any) -> Any:
        if document_QL is not None:
            document_QL = document_QL.as_strided(document_QL.shape, (document_QL.shape[1], 1))
        return super().heads(sequence_QLU, taps_UJ, heads, document_QL)


def test_kernels_that_misread_a_packed_tree_are_found() -> None:
    def apart(mixer: TorchMixer, dtype: torch.dtype) -> dict[str, float]:
        return recurrence_differences(lambda layout: KernelRecurrence(layout, read_paths, mixer), HEADS, CPU, dtype)

    assert max(apart(TorchMixer(), torch.float32).values()) < 1e-5
    assert max(apart(TorchMixer(), torch.bfloat16).values()) < 0.015
    # On whole tensors nothing is wrong with it.
    assert max(mixer_differences(_RowByRow(), HEADS, CPU, torch.float32).values()) == 0
    assert min(apart(_RowByRow(), torch.float32).values()) > KERNEL_BOUNDS[torch.bfloat16]


def test_kernels_are_given_the_documents_of_a_tree_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, given = packed_tree(CPU), []
    monkeypatch.setattr(mixing, "_each", lambda *asked: given.append(asked[4]))
    document_BS = layout.document_BN[:, : layout.trunk_width]
    inputs = torch.zeros(2, layout.trunk_width + HEADS.memory, HEADS.channels)
    TritonMixer().heads(inputs, torch.zeros(HEADS.channels, HEADS.memory + 1), HEADS, document_BS)
    read = given[0].as_strided((document_BS.numel(),), (1,))
    assert torch.equal(read, document_BS.flatten())


def test_a_wrong_rule_is_found_on_short_paths_too() -> None:
    def loud(query_QLIE: Tensor, *others: Any) -> Any:
        return read_paths(query_QLIE * 1.03, *others)

    rule: Any = loud
    for length in (14, 100):
        with torch.no_grad():  # the first pass that asks may be one without gradients
            apart = rule_differences(rule, CPU, torch.float32, (16, 16), length)
        assert apart["outputs"] == pytest.approx(0.03, rel=1e-3)
        assert apart["states"] == 0


def test_without_a_gpu_the_kernels_are_not_used_and_the_reason_is_kept() -> None:
    parts = recurrent_parts(tiny_model().model.layers[0].linear_attn)
    kernel, why = choose_step(RecurrentHeads.of(parts), CPU, torch.float32)
    assert kernel is None
    assert "cpu" in why
    assert "cpu" in str(triton_trouble(RecurrentHeads.of(parts), CPU, torch.float32))
    choice = choose_rule("auto", CPU, torch.float32, [parts])
    assert choice.name == "torch"
    assert choice.mixer is None
    assert "flash-linear-attention is not used" in choice.reason
    with pytest.raises(UserError, match="delta_rule = triton: of no use here"):
        choose_rule("triton", CPU, torch.float32, [parts])


def test_layers_with_another_norm_are_not_run_by_kernels() -> None:
    module: Any = tiny_model().model.layers[0].linear_attn
    assert finish_trouble(recurrent_parts(module)) is None

    class GateFirst(nn.Module):
        weight, variance_epsilon = module.norm.weight, 1e-6

        def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
            return torch.nn.functional.rms_norm(hidden * gate.sigmoid(), self.weight.shape, self.weight)

    module.norm = GateFirst()
    assert "norm and gate are other ones" in str(finish_trouble(recurrent_parts(module)))


def test_layers_in_shards_are_not_run_by_kernels() -> None:
    class Shard(Tensor):
        """A part of a weight, as far as anyone can tell: a product with it fails."""

        def to_local(self) -> Tensor:
            return self.as_subclass(Tensor)

    parts = recurrent_parts(tiny_model().model.layers[0].linear_attn)
    in_shards = replace(parts, norm_F=parts.norm_F[:3].detach().as_subclass(Shard))
    assert "in shards" in str(finish_trouble(in_shards))
