"""Recurrent layers over tree rows against the stock model reading one row per thought."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import lifted as casts_lifted
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

from tfive.tree.attention import TreePass
from tfive.tree.fast.delta_kernel import KernelRule
from tfive.tree.fast.delta_step import BranchSteps
from tfive.tree.grow import grow
from tfive.tree.hf import Backbone, recurrent_parts
from tfive.tree.layout import Layout, TextBatch, ThoughtPlan, Thoughts
from tfive.tree.recurrent import deltanet
from tfive.tree.recurrent.delta_rule import read_paths
from tfive.tree.recurrent.deltanet import DeltaRule, ForkMemory, RecurrentParts, StepRecurrence, TreeRecurrence

pytestmark = pytest.mark.model
VOCABULARY = 61
EXACT = 1e-9


class _InFloat64:
    """`torch` as the stock module sees it, with its float32 meaning float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock modules' float32 casts lifted to float64; ours follow their inputs."""
    monkeypatch.setattr(stock, "torch", _InFloat64())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def tiny_model(seed: int = 0) -> Qwen3_5ForCausalLM:
    """Three recurrent layers and one of attention, random, with decays slow enough that a wrong past shows."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(-6, -1)
    return model


@dataclass(frozen=True)
class Case:
    texts: TextBatch
    plan: ThoughtPlan
    thoughts: Thoughts


def make_case(
    documents: list[list[int]],
    positions: list[list[int]],
    plan: ThoughtPlan,
    lengths: list[list[int]] | None = None,
    closed: bool = False,
    seed: int = 0,
) -> Case:
    """Rows of documents of the given lengths (negative: padding) with branches at the given trunk indices."""
    g = torch.Generator().manual_seed(seed)
    numbers = [[-1 if n < 0 else i for i, n in enumerate(row) for _ in range(abs(n))] for row in documents]
    document = torch.tensor(numbers)
    tokens = torch.randint(VOCABULARY, document.shape, generator=g)
    position = torch.tensor(positions)
    texts = TextBatch(
        tokens, document, position, torch.where(position >= 0, torch.arange(position.numel()).view_as(position), -1)
    )
    branches = position.repeat_interleave(plan.group, 1)
    length = torch.full_like(branches, plan.length) if lengths is None else torch.tensor(lengths)
    written = torch.randint(VOCABULARY, (*branches.shape, plan.length), generator=g)
    ended = (length < plan.length) & (length > 0) if closed else torch.zeros_like(length, dtype=torch.bool)
    if plan.stop_id is not None:
        last = torch.arange(plan.length) == length[..., None] - 1
        written = torch.where(last & ended[..., None], plan.stop_id, written)
    thoughts = Thoughts(written, length, branches >= 0, ended, torch.zeros(*branches.shape, plan.length))
    return Case(texts, plan, thoughts)


PLAN = ThoughtPlan(length=5, checkpoints=(2, 5), horizon=4, open_ids=(7,), close_ids=(8,))
CASES = {
    "unequal positions": make_case([[90], [90]], [[3, 63, 64, 80], [0, 40, 70, -1]], PLAN),
    "packed and padded": make_case([[20, 70, -4], [66, 10, 18]], [[2, 17, 21, 85], [65, 66, 70, 80]], PLAN),
    "groups": make_case([[30], [30]], [[4, 20], [9, 25]], replace(PLAN, group=3)),
    # A row's start, the last token before a chunk boundary and the first after it, a packed document's start, an end.
    "groups anywhere": make_case([[70, 18, -2], [90]], [[0, 63, 64, 70], [31, 63, 84, -1]], replace(PLAN, group=3)),
    "no delimiters": make_case([[30]], [[4, 11, 20]], replace(PLAN, open_ids=(), close_ids=()), [[5, 0, 3]]),
    "long delimiters": make_case([[30]], [[1, 11, 20]], replace(PLAN, open_ids=(7, 9, 2, 4, 5), close_ids=(8, 3))),
    "sampled closes": make_case(
        [[30]], [[1, 11, 20, 24]], replace(PLAN, variable_length=True), [[1, 4, 2, 5]], closed=True
    ),
}


@dataclass
class Readings:
    """What both sides report, flattened over what exists."""

    log_probs: Tensor
    losses: Tensor
    values: Tensor

    def objective(self) -> Tensor:
        parts = (self.log_probs, self.losses, self.values)
        return sum(((p * torch.linspace(0.5, 1.5, len(p), dtype=p.dtype)).sum() for p in parts), torch.zeros(()))


def plain(model: Qwen3_5ForCausalLM, case: Case, probe_D: Tensor) -> Readings:
    """One row a thought and checkpoint through the stock model."""
    texts, plan, thoughts = case.texts, case.plan, case.thoughts
    log_probs, losses, values = [], [], []

    def read(row: list[int]) -> tuple[Tensor, Tensor]:
        output = model(torch.tensor([row]), output_hidden_states=True, use_cache=False)
        return output.logits[0].log_softmax(-1), output.hidden_states[-1][0]

    for b in range(len(texts.tokens_BS)):
        tokens, document = texts.tokens_BS[b].tolist(), texts.document_BS[b].tolist()
        for r in range(thoughts.length_BR.shape[1]):
            if not thoughts.valid_BR[b, r]:
                continue
            p, length = int(texts.positions_BP[b, r // plan.group]), int(thoughts.length_BR[b, r])
            start = document.index(document[p])
            after = [tokens[i] for i in range(p + 1, len(tokens)) if document[i] == document[p]][: plan.horizon]
            prefix = [*tokens[start : p + 1], *plan.open_ids]
            written = thoughts.tokens_BRT[b, r, :length].tolist()
            scores, hidden = read(prefix + written)
            for t in range(length):
                log_probs.append(scores[len(prefix) + t - 1, written[t]])
                values.append(hidden[len(prefix) + t - 1] @ probe_D)
            for tau in [t for t in plan.checkpoints if t < length] + [length]:
                close = [] if thoughts.closed_BR[b, r] and tau == length else plan.close_ids
                row = [*prefix, *written[:tau], *close]
                scores, _ = read(row + after)
                losses += [-scores[len(row) + j - 1, token] for j, token in enumerate(after)]
    return Readings(torch.stack(log_probs), torch.stack(losses), torch.stack(values))


def in_tree(
    model: Qwen3_5ForCausalLM, case: Case, probe_D: Tensor, rule: DeltaRule = read_paths, layout: Layout | None = None
) -> Readings:
    """The same numbers from one pass over trunk, thoughts and segments."""
    layout = layout or grow(case.texts, case.plan, case.thoughts, "all")
    backbone = Backbone(model)
    tree = TreePass(layout, "sdpa", recurrence=TreeRecurrence(layout, rule))
    hidden = backbone.run(backbone.embedding(layout.token_BN), layout.position_BN, tree)
    return readings(model, layout, hidden, probe_D)


def readings(model: Qwen3_5ForCausalLM, layout: Layout, hidden_BND: Tensor, probe_D: Tensor) -> Readings:
    scores = model.lm_head(hidden_BND).log_softmax(-1)
    row = torch.arange(len(hidden_BND))
    b = row[:, None, None].expand_as(layout.action_node_BRT)[layout.action_mask_BRT]
    node = layout.action_node_BRT[layout.action_mask_BRT]
    place = layout.plan.open_width + torch.arange(layout.plan.length)
    own = layout.thought_start + torch.arange(layout.branch_count)[:, None] * layout.thought_width + place
    token = layout.token_BN[row[:, None, None], own][layout.action_mask_BRT]
    kept = layout.segment_mask_BRK[..., None] & layout.loss_mask_BRH[:, :, None]
    target = layout.loss_target_BRH[:, :, None].expand_as(kept)
    losses = -scores[row[:, None, None, None], layout.loss_node_BRKH, target][kept]
    return Readings(scores[b, node, token], losses, hidden_BND[b, node] @ probe_D)


def gradients(model: Qwen3_5ForCausalLM, objective: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(objective, list(named.values()))))


def off(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().abs().max() / want.detach().abs().max())


def worst(got: Readings, want: Readings) -> float:
    return max(off(getattr(got, n), getattr(want, n)) for n in ("log_probs", "losses", "values"))


@pytest.fixture
def probe() -> Tensor:
    return torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.usefixtures("lifted")
@pytest.mark.parametrize("name", CASES)
def test_tree_equals_plain_rows_with_gradients(name: str, probe: Tensor) -> None:
    model = tiny_model()
    want, got = plain(model, CASES[name], probe), in_tree(model, CASES[name], probe)
    assert want.losses.numel() > 0
    assert worst(got, want) < EXACT
    want_grads, got_grads = gradients(model, want.objective()), gradients(model, got.objective())
    assert max(off(got_grads[n], g) for n, g in want_grads.items()) < EXACT
    assert sum(".linear_attn." in n for n in want_grads) == 3 * 9


@pytest.mark.parametrize("name", CASES)
def test_stock_casts_cost_at_most_float32(name: str, probe: Tensor) -> None:
    """The stock rule computes in float32 whatever the weights are; ours does not: this is the noise of the former."""
    model = tiny_model()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(0.02 / 0.3)
    want, got = plain(model, CASES[name], probe), in_tree(model, CASES[name], probe)
    assert worst(got, want) < 1e-6
    want_grads, got_grads = gradients(model, want.objective()), gradients(model, got.objective())
    assert max(off(got_grads[n], g) for n, g in want_grads.items()) < 1e-5


def test_recomputed_activations_give_the_same_gradients(probe: Tensor) -> None:
    case, model = CASES["packed and padded"], tiny_model()
    layout, backbone = grow(case.texts, case.plan, case.thoughts, "all"), Backbone(model)
    found = []
    for recompute in (False, True):
        tree = TreePass(layout, "sdpa", recurrence=TreeRecurrence(layout, read_paths))
        embeds = backbone.embedding(layout.token_BN)
        hidden = backbone.run(embeds, layout.position_BN, tree, recompute=recompute)
        found.append(gradients(model, readings(model, layout, hidden, probe).objective()))
    assert max(off(found[1][n], g) for n, g in found[0].items()) < 1e-12


@pytest.mark.usefixtures("lifted")
def test_kernel_adapter_in_the_tree(probe: Tensor) -> None:
    def kernel(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        output, trace = read_paths(*inputs)
        paths, length = inputs[0].shape[:2]
        return output, trace.state_after(torch.arange(paths), torch.full((paths,), length))

    model = tiny_model()
    for name in ("packed and padded", "groups"):
        mine, kernels = (in_tree(model, CASES[name], probe, rule) for rule in (read_paths, KernelRule(kernel)))
        assert worst(kernels, mine) < EXACT


def _early_fork(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> Layout:
    honest = deltanet._Forks.of

    def wrong(document: Tensor, position: Tensor, reach: int) -> Any:
        forks = honest(document, position, reach)
        return replace(forks, count_X=forks.count_X - 1)

    monkeypatch.setattr(deltanet._Forks, "of", staticmethod(wrong))
    return layout


def _shifted_tail(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> Layout:
    honest = deltanet._Forks.tail
    monkeypatch.setattr(deltanet._Forks, "tail", lambda self, trunk: honest(self, trunk).roll(1, 1))
    return layout


def _early_checkpoint(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> Layout:
    return replace(layout, checkpoint_BRK=(layout.checkpoint_BRK - 1).clamp(min=0))


def _leaking_documents(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> Layout:
    return replace(layout, parent_BN=layout.parent_BN.clamp(min=0))


def _late_position(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> Layout:
    branch = torch.arange(layout.node_count) >= layout.trunk_width
    return replace(layout, position_BN=layout.position_BN + branch)


def _swapped_forks(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> Layout:
    honest = deltanet.TreeRecurrence._of_branches
    monkeypatch.setattr(deltanet.TreeRecurrence, "_of_branches", lambda self, forks: honest(self, forks).roll(1, 0))
    return layout


MUTATIONS = [_early_fork, _swapped_forks, _shifted_tail, _early_checkpoint, _leaking_documents, _late_position]


@pytest.mark.usefixtures("lifted")
@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("name", ["packed and padded", "groups anywhere"])
def test_mutations_miss_the_bound_a_hundredfold(
    name: str, mutate: Any, probe: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, case = tiny_model(), CASES[name]
    honest = in_tree(model, case, probe)
    layout = mutate(monkeypatch, grow(case.texts, case.plan, case.thoughts, "all"))
    assert worst(in_tree(model, case, probe, layout=layout), honest) > 100 * EXACT


@pytest.mark.parametrize("name", ["packed and padded", "groups", "groups anywhere", "sampled closes"])
def test_cached_trunk_equals_the_whole_pass(name: str, probe: Tensor) -> None:
    case, model = CASES[name], tiny_model()
    backbone = Backbone(model)
    whole = grow(case.texts, case.plan, case.thoughts, "all")
    want = in_tree(model, case, probe)
    with torch.no_grad():
        trunk = grow(case.texts, case.plan)
        memory = TreeRecurrence(trunk, read_paths, case.texts.positions_BP, keep=True)
        reading = TreePass(trunk, "sdpa", keep=True, recurrence=memory)
        of_trunk = backbone.run(backbone.embedding(trunk.token_BN), trunk.position_BN, reading)
        start = whole.trunk_width
        later = TreeRecurrence(whole, read_paths, case.texts.positions_BP, memory.memory)
        tree = TreePass(whole, "sdpa", trunk=reading.kept, recurrence=later)
        of_branches = backbone.run(backbone.embedding(whole.token_BN[:, start:]), whole.position_BN[:, start:], tree)
    got = readings(model, whole, torch.cat([of_trunk, of_branches], 1), probe)
    assert worst(got, want) < EXACT


def test_part_of_the_branches_finds_its_forks() -> None:
    case, module = CASES["groups"], tiny_model().model.layers[0].linear_attn
    parts = recurrent_parts(module)
    position_BR = case.texts.positions_BP.repeat_interleave(3, 1)
    whole = grow(case.texts, case.plan, case.thoughts, "last")
    hidden = torch.randn(2, whole.node_count, 32, dtype=torch.float64)
    trunk = TreeRecurrence(grow(case.texts, case.plan), read_paths, case.texts.positions_BP, keep=True)
    trunk.mix(parts, hidden[:, : whole.trunk_width])
    want = TreeRecurrence(whole, read_paths).mix(parts, hidden)
    for start, stop in ((0, 4), (4, 6), (3, 6)):
        part = grow(case.texts, case.plan, case.thoughts.branches(start, stop), "last", position_BR[:, start:stop])
        first, last = start * whole.thought_width, stop * whole.thought_width
        left, right = start * whole.segment_width, stop * whole.segment_width
        chosen = [whole.thought_start + i for i in range(first, last)]
        chosen += [whole.segment_start + i for i in range(left, right)]
        some = TreeRecurrence(part, read_paths, case.texts.positions_BP, trunk.memory)
        torch.testing.assert_close(some.mix(parts, hidden[:, chosen]), want[:, chosen], rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="not kept"):
        TreeRecurrence(part, read_paths, case.texts.positions_BP + 1, trunk.memory)


StepsOf = Callable[[dict[int, ForkMemory], int, int, RecurrentParts], StepRecurrence | BranchSteps]
"""Memory, branches, steps and a layer's parts to what goes through them node by node."""


def check_steps(name: str, steps_of: StepsOf) -> None:
    """Steps of all branches from their forks give what one pass over all nodes does."""
    case, model = CASES[name], tiny_model()
    parts = recurrent_parts(model.model.layers[1].linear_attn)
    layout = grow(case.texts, case.plan, replace(case.thoughts, length_BR=torch.full_like(case.thoughts.length_BR, 5)))
    rows, branches = layout.position_BR.shape
    hidden = torch.randn(rows, layout.node_count, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), casts_lifted():
        want = TreeRecurrence(layout, read_paths).mix(parts, hidden)[:, layout.trunk_width :]
        trunk = TreeRecurrence(grow(case.texts, case.plan), read_paths, case.texts.positions_BP, keep=True)
        trunk.mix(parts, hidden[:, : layout.trunk_width])
        steps = steps_of(trunk.memory, rows * branches, layout.thought_width, parts)
        inputs = hidden[:, layout.trunk_width :].unflatten(1, (branches, -1))
        for _ in range(2):  # the second time after what the first has left in the buffers
            steps.begin(trunk.memory)
            got = []
            for t in range(layout.thought_width):
                got.append(steps.mix(parts, inputs[:, :, t]))
                steps.advance()
    seen = torch.stack(got, 2)[layout.position_BR >= 0]
    torch.testing.assert_close(seen, want.unflatten(1, (branches, -1))[layout.position_BR >= 0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "window"),
    [("packed and padded", 64), ("groups", 64), ("groups", 2), ("groups anywhere", 2), ("sampled closes", 64)],
)
def test_steps_equal_the_whole_pass(name: str, window: int) -> None:
    check_steps(name, lambda memory, branches, steps, _: StepRecurrence(memory, branches, steps, window))


def test_hidden_parts_do_not_leak() -> None:
    case, model = CASES["unequal positions"], tiny_model()
    parts = recurrent_parts(model.model.layers[0].linear_attn)
    layout = grow(case.texts, case.plan, case.thoughts, "all")
    hidden = torch.randn(2, layout.node_count, 32, dtype=torch.float64)
    before = TreeRecurrence(layout, read_paths).mix(parts, hidden)
    real = layout.kind_BN >= 0
    hidden_from = ~layout.mask()[:, 0] & real[:, :, None]
    generator = torch.Generator().manual_seed(1)
    for node in torch.randint(layout.node_count, (12,), generator=generator).tolist():
        moved = hidden.clone()
        moved[:, node] += 1
        changed = (TreeRecurrence(layout, read_paths).mix(parts, moved) != before).any(-1)
        assert not (changed & hidden_from[:, :, node]).any()
        assert changed[:, node].any()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
