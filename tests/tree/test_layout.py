"""The layout against the plain meaning of its rows."""

from __future__ import annotations

import pytest
import torch
from cases import Case, cases, random_case
from hypothesis import given, settings
from plain import branches_of
from torch.nn.attention.flex_attention import create_mask

from tfive.errors import UserError
from tfive.tree.grow import grow, no_thoughts
from tfive.tree.layout import PADDING, Layout, TextBatch, ThoughtPlan, plan_thoughts
from tfive.tree.settings import ThoughtSettings


def ancestry(layout: Layout, row: int, node: int) -> list[int]:
    path = [node]
    while layout.parent_BN[row, path[-1]] >= 0:
        path.append(int(layout.parent_BN[row, path[-1]]))
    return path[::-1]


def tokens_on(layout: Layout, row: int, node: int) -> list[int]:
    """Tokens from the document's start to `node`, learned delimiters as −1 (opening) and −2 (close)."""
    path = ancestry(layout, row, node)
    tokens, delimiters = layout.token_BN[row, path].tolist(), layout.delimiter_BN[row, path].tolist()
    return [t if d < 0 else -1 - d for t, d in zip(tokens, delimiters)]


def ids(plan: ThoughtPlan) -> tuple[list[int], list[int]]:
    return ([-1], [-2]) if plan.learned else (list(plan.open_ids), list(plan.close_ids))


@given(cases())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_node_sees_its_ancestors_and_itself_alone(case: Case) -> None:
    layout = grow(case.texts, case.plan, case.thoughts, "all")
    seen, near = layout.mask()[:, 0], layout.mask(window=3)[:, 0]
    for row in range(len(seen)):
        for node in range(layout.node_count):
            path = ancestry(layout, row, node)
            assert seen[row, node].nonzero().flatten().tolist() == sorted(path)
            if layout.kind_BN[row, node] != PADDING:
                assert layout.position_BN[row, node] == len(path) - 1
                assert near[row, node].nonzero().flatten().tolist() == sorted(path[-3:])


@given(cases())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_indices_point_at_the_plain_rows(case: Case) -> None:
    plan, thoughts = case.plan, case.thoughts
    layout = grow(case.texts, plan, thoughts, "all")
    opening, close = ids(plan)
    plain = iter(branches_of(case.texts, plan, thoughts))
    for row, r in thoughts.valid_BR.nonzero().tolist():
        branch = next(plain)
        thought = list(branch.thought)
        if branch.closed and plan.learned:
            thought[-1] = -2
        assert layout.action_mask_BRT[row, r].sum() == len(thought)
        for step in range(len(thought)):
            before = tokens_on(layout, row, int(layout.action_node_BRT[row, r, step]))
            assert before == branch.prefix + opening + thought[:step]
        taus = sorted({t for t in plan.checkpoints if t < len(thought)} | {len(thought)})
        exists = layout.segment_mask_BRK[row, r]
        assert layout.checkpoint_BRK[row, r][exists].tolist() == taus
        for k, tau in enumerate(taus):
            end = [] if branch.closed and tau == len(thought) else close
            for ahead in range(plan.horizon):
                start = branch.prefix + opening + thought[:tau] + end
                assert (
                    tokens_on(layout, row, int(layout.loss_node_BRKH[row, r, k, ahead]))
                    == start + branch.continuation[:ahead]
                )
                plain_node = int(layout.trunk_loss_node_BRH[row, r, ahead])
                assert tokens_on(layout, row, plain_node) == branch.prefix + branch.continuation[:ahead]
        assert layout.loss_target_BRH[row, r].tolist() == branch.continuation


def test_flex_masks_say_the_same() -> None:
    case = random_case(3, "text2", variable=True, group=2)
    layout = grow(case.texts, case.plan, case.thoughts, "all")
    rows, nodes = layout.token_BN.shape
    for start, window in ((0, None), (layout.trunk_width, None), (0, 4)):
        flexed = create_mask(layout.mask_mod(start, window), rows, None, nodes - start, nodes, device="cpu")
        assert torch.equal(flexed, layout.mask(start, window))
    assert layout.block_mask().shape == (rows, 1, nodes, nodes)


def test_a_continuation_that_leaves_its_document_is_masked() -> None:
    case = random_case(0, horizon=4)
    document_BS = case.texts.document_BS.clone()
    p = int(case.texts.positions_BP[1, 0])
    document_BS[1, p + 3 :] = 5
    texts = TextBatch(case.texts.tokens_BS, document_BS, case.texts.positions_BP, case.texts.items_BP)
    layout = grow(texts, case.plan, case.thoughts, "last")
    assert layout.loss_mask_BRH[1, 0].tolist() == [True, True, False, False]


def test_the_trunk_alone_and_scoring_free_rows() -> None:
    case = random_case(1, "text")
    assert grow(case.texts, case.plan).node_count == case.texts.tokens_BS.shape[1]
    bare = grow(case.texts, case.plan, case.thoughts)
    assert int((bare.kind_BN >= 3).sum()) == 0
    assert bare.segment_count == 0


def test_text_targets_stay_inside_documents() -> None:
    case = random_case(1)
    layout = grow(case.texts, case.plan)
    target, tokens, documents = layout.text_target_BS[0], case.texts.tokens_BS[0], case.texts.document_BS[0]
    for i in range(len(tokens)):
        inside = i + 1 < len(tokens) and documents[i] == documents[i + 1] >= 0
        assert target[i] == (tokens[i + 1] if inside else -1)


def test_empty_thoughts_have_one_checkpoint() -> None:
    case = random_case(2, "text")
    layout = grow(case.texts, case.plan, no_thoughts(2, 3, case.plan, "cpu"), "all")
    assert layout.segment_mask_BRK[0].tolist() == [[True, False]] * 3
    assert layout.checkpoint_BRK[0].tolist() == [[0, 0]] * 3
    assert not layout.action_mask_BRT.any()


def test_plans_from_settings() -> None:
    def encode(text: str) -> list[int]:
        return [ord(c) for c in text]

    plan = plan_thoughts(ThoughtSettings(), encode, special_ids=(2,))
    assert (plan.open_ids, plan.close_ids, plan.forbidden_ids) == ((32, 40), (41,), (2,))
    assert plan_thoughts(ThoughtSettings(open="("), encode, (2,)).forbidden_ids == (2, 40)
    assert plan_thoughts(ThoughtSettings(delimiters="learned", open="("), encode, (2,)).forbidden_ids == (2,)
    closable = plan_thoughts(ThoughtSettings(variable_length=True), encode, special_ids=(2, 41))
    assert closable.forbidden_ids == (2,)
    assert closable.stop_id == 41
    with pytest.raises(UserError, match=r"thought\.close.*2 tokens"):
        plan_thoughts(ThoughtSettings(close="))", variable_length=True), encode)


@pytest.mark.parametrize(
    "bad",
    [
        {"checkpoints": (4, 8)},
        {"checkpoints": (8, 4, 12)},
        {"delimiters": "none", "variable_length": True},
        {"open": ""},
    ],
)
def test_impossible_settings_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError):
        ThoughtSettings(**bad)
