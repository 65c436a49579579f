"""Sampling: the law, its log-probabilities, forbidden tokens, early stops, and independence from batching."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import STOP, Case, lifted, random_case
from exact import apart
from families import DENSE, HYBRID, VOCABULARY, WINDOWED, tiny
from plain import PlainModel
from torch import Tensor

from pretended_graphs import PretendedGraphs
from tfive.rng import uniforms
from tfive.tree.fast.cuda_graph import CudaGraphs
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.head import OUT_OF_REACH
from tfive.tree.law import BLOCK, draw, law_logits
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.settings import Attention, EngineOptions, SamplingSettings


def numbers(texts: TextBatch, group: int, length: int, window: int = 0) -> Tensor:
    """One uniform per (item, member, step), whatever the batch."""
    item = texts.items_BP.clamp(min=0).repeat_interleave(group, 1).numpy()[..., None]
    member = np.tile(np.arange(group), texts.items_BP.shape[1])[:, None]
    return torch.from_numpy(uniforms(0, "test", window, item, member, np.arange(length)))


def reference_law(logits: Tensor, law: SamplingSettings) -> Tensor:
    """Probabilities of the law for one row of logits, by sorting."""
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    scaled = logits / law.temperature
    keep = order[: law.top_k] if law.top_k else order
    p = scaled[keep].softmax(-1)
    before, kept = 0.0, []
    for i, share in zip(keep, p.tolist()):
        if before < law.top_p:
            kept.append(i)
        before += share
    q = torch.zeros_like(logits)
    q[kept] = scaled[kept].softmax(-1)
    return q


LAWS = [
    SamplingSettings(),
    SamplingSettings(temperature=0.6),
    SamplingSettings(top_k=5),
    SamplingSettings(temperature=1.7, top_p=0.8),
    SamplingSettings(temperature=0.8, top_k=12, top_p=0.7),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_law_of_logits(law: SamplingSettings) -> None:
    logits = torch.randn(20, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, 3] = OUT_OF_REACH
    q = law_logits(logits, law).softmax(-1)
    for row, found in zip(logits, q):
        assert torch.allclose(found, reference_law(row, law), atol=1e-12)


def test_draws_follow_the_distribution() -> None:
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    logits[0, ::7] = OUT_OF_REACH
    count = 20_000
    u = torch.from_numpy(uniforms(1, "draw", 0, np.arange(count)))
    tokens, log_q = draw(logits.expand(count, -1), u)
    p = logits[0].softmax(-1)
    assert torch.allclose(log_q, p.log()[tokens])
    assert not (tokens % 7 == 0).any()
    often = p * count > 20
    seen = torch.bincount(tokens, minlength=700)[often]
    chi = float(((seen - p[often] * count) ** 2 / (p[often] * count)).sum())
    degrees = int(often.sum())
    assert abs(chi - degrees) < 5 * (2 * degrees) ** 0.5


def test_draws_are_the_inverse_of_the_distribution_function() -> None:
    vocabulary = 250_000
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(2)) * 3
    cdf = (logits.double() - logits.amax(-1, keepdim=True)).exp().cumsum(-1)
    cdf = cdf / cdf[:, -1:]
    wanted = torch.tensor([17, BLOCK * 100 - 1, vocabulary - 1])
    rows = torch.arange(3)
    middle = (cdf[rows, wanted] + cdf[rows, wanted - 1]) / 2
    assert torch.equal(draw(logits, middle)[0], wanted)
    for edge in (1e-18, 1 - 1e-16):
        token, log_q = draw(logits, torch.full((3,), edge, dtype=torch.float64))
        assert torch.isfinite(log_q).all()
        assert ((token >= 0) & (token < vocabulary)).all()


def test_the_last_drawable_entry_is_not_passed() -> None:
    logits = torch.full((1, 3 * BLOCK), float("-inf"))
    logits[0, 5], logits[0, BLOCK + 2] = 0.0, 0.0
    token, _ = draw(logits, torch.tensor([1.0], dtype=torch.float64))
    assert token.tolist() == [BLOCK + 2]


def check_against_plain(tree: TreeModel, case: Case, thoughts: Thoughts, law: SamplingSettings, u: Tensor) -> None:
    """Every recorded action is what a plain row's logits give for its uniform number, with its log-probability."""
    delimiters = None if tree.delimiters is None else tree.delimiters.weight_2D
    plain = PlainModel(tree.model, case.plan, delimiters)
    rows = iter(plain.logits_before_actions(case.texts, thoughts))
    for row, r in thoughts.valid_BR.nonzero().tolist():
        for step, logits in enumerate(next(rows)):
            q = reference_law(logits, law)
            token = int(thoughts.tokens_BRT[row, r, step])
            assert token == int((q.cumsum(-1) <= u[row, r, step]).sum())
            assert abs(float(thoughts.log_q_BRT[row, r, step]) - float(q[token].log())) < 1e-5


@pytest.mark.model
@pytest.mark.parametrize("family", DENSE + WINDOWED + HYBRID)
@pytest.mark.parametrize("law", [LAWS[0], LAWS[4]], ids=str)
def test_sampled_thoughts_against_plain_rows(family: str, law: SamplingSettings) -> None:
    case = random_case(1, "text2", variable=True, group=2)
    tree = TreeModel(tiny(family), case.plan, EngineOptions(head_bytes=5 * 4 * VOCABULARY))
    u = numbers(case.texts, 2, case.plan.length)
    with lifted():
        thoughts = tree.sample(case.texts, u, law)
        check_against_plain(tree, case, thoughts, law, u)
    assert torch.equal(thoughts.valid_BR, case.thoughts.valid_BR)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["none", "text", "learned"])
@pytest.mark.parametrize("attention", ["folded", "sdpa"])
def test_sampling_with_every_delimiter(kind: str, attention: Attention) -> None:
    case = random_case(2, kind)
    model = tiny("qwen3")
    delimiters = Delimiters.from_model(model, case.plan).double() if kind == "learned" else None
    tree = TreeModel(model, case.plan, EngineOptions(attention=attention), delimiters)
    u = numbers(case.texts, 1, case.plan.length)
    reading = tree.read(case.texts)
    thoughts = tree.sample(case.texts, u, SamplingSettings(), reading)
    check_against_plain(tree, case, thoughts, SamplingSettings(), u)
    again = tree.sample(case.texts, u, SamplingSettings(), reading)
    assert torch.equal(again.tokens_BRT, thoughts.tokens_BRT)
    assert (thoughts.length_BR[thoughts.valid_BR] == case.plan.length).all()


@pytest.mark.model
def test_buffers_are_fresh_for_every_batch() -> None:
    one, two = random_case(3, "text"), random_case(4, "text")
    tree = TreeModel(tiny("llama"), one.plan)
    u = numbers(one.texts, 1, one.plan.length)
    tree.sample(one.texts, u, SamplingSettings())
    thoughts = tree.sample(two.texts, u, SamplingSettings())
    assert len(tree._samplers) == 1
    check_against_plain(tree, two, thoughts, SamplingSettings(), u)


@pytest.mark.model
def test_new_weights_are_seen_at_once() -> None:
    case = random_case(5, "text")
    model, other = tiny("llama"), tiny("llama", seed=7)
    tree, u = TreeModel(model, case.plan), numbers(case.texts, 1, case.plan.length)
    before = tree.sample(case.texts, u, SamplingSettings())
    model.load_state_dict(other.state_dict())
    thoughts = tree.sample(case.texts, u, SamplingSettings())
    assert not torch.equal(before.tokens_BRT, thoughts.tokens_BRT)
    check_against_plain(tree, case, thoughts, SamplingSettings(), u)


@pytest.mark.model
def test_forbidden_tokens_are_never_sampled_and_stops_end_thoughts() -> None:
    case = random_case(6, "text", variable=True, rows=4, group=8, length=6)
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
    tree = TreeModel(model, case.plan)
    texts, plan = case.texts, case.plan
    seen: set[int] = set()
    lengths: set[int] = set()
    for window in range(10):
        thoughts = tree.sample(texts, numbers(texts, 8, plan.length, window), SamplingSettings())
        seen |= set(thoughts.tokens_BRT[thoughts.mask_BRT].tolist())
        lengths |= set(thoughts.length_BR[thoughts.closed_BR].tolist())
        stops = (thoughts.tokens_BRT == STOP) & thoughts.mask_BRT
        assert torch.equal(stops.sum(-1) > 0, thoughts.closed_BR)
        assert torch.equal(stops.int().argmax(-1)[thoughts.closed_BR] + 1, thoughts.length_BR[thoughts.closed_BR])
        open_end = thoughts.valid_BR & ~thoughts.closed_BR
        assert (thoughts.length_BR[open_end] == plan.length).all()
        assert (thoughts.log_q_BRT[~thoughts.mask_BRT] == 0).all()
        assert (thoughts.length_BR[~thoughts.valid_BR] == 0).all()
    assert seen == set(range(VOCABULARY)) - {0, 1, 7}
    assert lengths == set(range(1, plan.length + 1))


@pytest.mark.model
@pytest.mark.parametrize("law", [LAWS[0], LAWS[4]], ids=str)
def test_parity_does_not_depend_on_batching(law: SamplingSettings) -> None:
    case = random_case(7, "text2", variable=True, rows=3, group=2)
    law = law.model_copy(update={"parity": True})
    tree = TreeModel(tiny("llama", torch.float32), case.plan)
    u = numbers(case.texts, 2, case.plan.length)
    together = tree.sample(case.texts, u, law)
    for row in range(3):
        alone = tree.sample(case.texts.rows(row, row + 1), u[row : row + 1], law)
        assert torch.equal(alone.tokens_BRT, together.tokens_BRT[row : row + 1])
        assert torch.equal(alone.log_q_BRT, together.log_q_BRT[row : row + 1])
    policy = tree.policy(case.texts, together, parity=True, entropy=True)
    if law.temperature == 1:
        assert torch.equal(policy.need("log_prob_BRT").detach(), together.log_q_BRT)
    batch = tree.policy(case.texts, together, entropy=True)
    assert apart(policy.need("entropy_BRT"), batch.need("entropy_BRT")) < 1e-5
    assert apart(policy.need("log_prob_BRT"), batch.need("log_prob_BRT")) < 1e-5


@pytest.mark.model
def test_mismatch_outside_parity_is_small_and_measured() -> None:
    case = random_case(8, "text", rows=3, group=4, length=6)
    u = numbers(case.texts, 4, case.plan.length)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.2)):
        tree = TreeModel(tiny("llama", dtype), case.plan)
        thoughts = tree.sample(case.texts, u, SamplingSettings())
        gap = (tree.policy(case.texts, thoughts).need("log_prob_BRT") - thoughts.log_q_BRT)[thoughts.mask_BRT]
        assert float(gap.detach().abs().mean()) < bound
        parity = tree.sample(case.texts, u, SamplingSettings(parity=True))
        flips = (parity.tokens_BRT != thoughts.tokens_BRT)[thoughts.mask_BRT].float().mean()
        assert dtype == torch.bfloat16 or flips == 0


@pytest.mark.model
def test_a_text_without_continuation_can_be_sampled_from() -> None:
    case = random_case(9, "text", rows=1, count=1)
    last = torch.full((1, 1), case.texts.tokens_BS.shape[1] - 2)
    texts = replace(case.texts, positions_BP=last)
    tree, u = TreeModel(tiny("llama"), case.plan), numbers(texts, 1, case.plan.length)
    thoughts = tree.sample(texts, u, SamplingSettings())
    check_against_plain(tree, replace(case, texts=texts), thoughts, SamplingSettings(), u)


@pytest.mark.model
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
def test_a_replayed_step_is_the_same_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured route, with the step itself in place of the graph: warm-up must leave no trace."""
    case = random_case(10, "text2", group=2)
    u = numbers(case.texts, 2, case.plan.length)
    model = tiny(family)
    eager = TreeModel(model, case.plan).sample(case.texts, u, SamplingSettings())

    graphs = PretendedGraphs()
    monkeypatch.setattr(CudaGraphs, "on", lambda *_: graphs)
    tree = TreeModel(model, case.plan)
    for _ in range(2):
        found = tree.sample(case.texts, u, SamplingSettings())
        assert torch.equal(found.tokens_BRT, eager.tokens_BRT)
        assert torch.equal(found.log_q_BRT, eager.log_q_BRT)
    assert [graph.replays for graph in graphs.graphs] == [2 * (case.plan.open_width + case.plan.length - 1)]


@pytest.mark.model
def test_buffers_of_few_shapes_are_kept() -> None:
    case = random_case(11, "text", rows=6)
    tree = TreeModel(tiny("llama"), case.plan)
    u = numbers(case.texts, 1, case.plan.length)
    for rows in range(1, 7):
        tree.sample(case.texts.rows(0, rows), u[:rows], SamplingSettings())
    assert [key[0][0] for key in tree._samplers] == [3, 4, 5, 6]
