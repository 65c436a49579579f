"""Critics read what the plain model would read, train only what they own, and share what is frozen."""

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tfive.errors import UserError
from tfive.rl.adapters import with_lora
from tfive.rl.critic import Critic, FrozenBase, ValueHead, build_pair
from tfive.rl.critic_files import load_critics, save_critics
from tfive.rl.initial import InitialWeights
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.settings import CriticSettings
from tfive.training.checkpoint import CheckpointStore
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts
from tfive.tree.low_rank import LoraLinear

pytestmark = pytest.mark.model
ADAPT = ["head", "probe", "top", "lora", "full"]
B, S, R, T, VOCABULARY = 2, 20, 3, 4, 31


def tiny(kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": True,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if kind == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        linear: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        linear |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "full_attention_interval": 2}
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **linear))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    filled: PreTrainedModel = cast(Any, model).to(dtype)
    return filled.eval().requires_grad_(False)


def batch(variable: bool = False) -> tuple[TextBatch, Thoughts]:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randint(3, VOCABULARY, shape, generator=generator)

    document = torch.zeros(B, S, dtype=torch.int64)
    document[1, 9:] = 1
    texts = TextBatch(draw(B, S), document, torch.tensor([[3, 8, 14], [5, 12, -1]]), torch.arange(B * R).view(B, R))
    valid = texts.positions_BP >= 0
    length = torch.tensor([[4, 2, 1], [3, 4, 0]]) if variable else torch.full((B, R), T) * valid
    closed = torch.zeros(B, R, dtype=torch.bool)
    return texts, Thoughts(draw(B, R, T), length, valid, closed, torch.zeros(B, R, T))


PLAN = ThoughtPlan(length=T, checkpoints=(2, T), horizon=3, open_ids=(1, 2), close_ids=(2,))


def settings(adapt: str, **changes: object) -> CriticSettings:
    return CriticSettings(adapt=adapt, blocks=2, lora_rank=2, width=8, **changes)


def critic_of(base: PreTrainedModel, adapt: str, seed: int = 0, **changes: object) -> tuple[Critic, FrozenBase]:
    chosen = settings(adapt, **changes)
    critic = Critic(base, PLAN, chosen, initial=InitialWeights(seed, "critic 1"))
    critic.head.to(base.dtype)
    return critic, FrozenBase(base, PLAN, chosen)


def plain_values(
    base: PreTrainedModel, head: ValueHead, texts: TextBatch, thoughts: Thoughts, block: int | None = None
) -> Tensor:
    """One row per state: the text of p's document up to p, the opening, the thought so far; V reads its last token, at
    the end or as it enters `block`."""
    values = torch.zeros(B, R, T, dtype=torch.float64)
    for b in range(B):
        for r in range(R):
            p = int(texts.positions_BP[b, r])
            for t in range(int(thoughts.length_BR[b, r])):
                start = int((texts.document_BS[b] == texts.document_BS[b, p]).nonzero()[0])
                row = [*texts.tokens_BS[b, start : p + 1].tolist(), 1, 2, *thoughts.tokens_BRT[b, r, :t].tolist()]
                output = base.base_model(torch.tensor([row]), use_cache=False, output_hidden_states=True)
                hidden = (output.last_hidden_state if block is None else output.hidden_states[block])[0, -1]
                values[b, r, t] = head(hidden[None], torch.tensor([t]))[0]
    return values


@pytest.mark.parametrize("kind", ["llama", "qwen3.5"])
@pytest.mark.parametrize("adapt", ADAPT)
def test_values_are_those_of_the_plain_model(kind: str, adapt: str) -> None:
    base = tiny(kind)
    texts, thoughts = batch(variable=True)
    critic, frozen = critic_of(base, adapt)
    values = critic.values(texts, thoughts, frozen.read(texts, thoughts))
    expected = plain_values(base, critic.head, texts, thoughts, block=2 if adapt == "probe" else None)
    assert values.shape == (B, R, T)
    assert (values[~thoughts.mask_BRT] == 0).all()
    torch.testing.assert_close(values.detach(), expected.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["llama", "qwen3.5"])
@pytest.mark.parametrize("adapt", ADAPT)
def test_training_moves_what_the_critic_owns_and_nothing_else(kind: str, adapt: str) -> None:
    base = tiny(kind)
    before = copy.deepcopy(base.state_dict())
    texts, thoughts = batch()
    critic, frozen = critic_of(base, adapt)
    shared = frozen.read(texts, thoughts)
    start = critic.values(texts, thoughts, shared).detach()
    optimizer = MasterOptimizer(critic.trainable(), lr=1e-2, clip_norm=None)
    for _ in range(2):
        (critic.values(texts, thoughts, shared) - 1).square().sum().backward()
        # While `up` is still zero, `down` of a low-rank update has a gradient of exactly zero.
        still = [name for name, gradient in optimizer.gradients() if not gradient.any()]
        assert [name for name in still if not name.endswith("down")] == []
        optimizer.step()
    assert not critic.values(texts, thoughts, shared).equal(start)
    assert all(before[name].equal(value) for name, value in base.state_dict().items())
    assert all(parameter.grad is None for parameter in base.parameters())
    owned = {name.split(".")[0] for name, _ in critic.trainable()}
    assert owned == ({"head"} if adapt in ("head", "probe") else {"head", "body"})
    blocks = {int(name.split("layers.")[1].split(".")[0]) for name, _ in critic.trainable() if "layers." in name}
    assert blocks == {"head": set(), "probe": set(), "top": {2, 3}, "lora": {2, 3}, "full": {0, 1, 2, 3}}[adapt]


@pytest.mark.parametrize("adapt", ["top", "lora", "full"])
def test_gradients_of_adapted_blocks_agree_with_the_plain_model(adapt: str) -> None:
    """The critic's blocks, put back into a whole model that reads one row per state, get the same gradients."""
    base = tiny("llama")
    texts, thoughts = batch(variable=True)
    critic, frozen = critic_of(base, adapt)
    with torch.no_grad():
        for _, parameter in critic.trainable():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    whole: Any = copy.deepcopy(base)
    body: Any = critic.body
    for number in range(critic.first_block, 4):
        whole.model.layers[number] = body.layers[number]
    whole.model.norm = body.norm
    if adapt == "full":
        whole.model.embed_tokens = body.embed_tokens
    parameters = [parameter for _, parameter in critic.trainable()]
    values = critic.values(texts, thoughts, frozen.read(texts, thoughts))
    tree = torch.autograd.grad(values.square().sum(), parameters)
    expected = plain_values(whole, critic.head, texts, thoughts)
    plain = torch.autograd.grad(expected.square().sum(), parameters)
    torch.testing.assert_close(values.detach(), expected.detach(), rtol=1e-6, atol=1e-9)
    for ours, theirs in zip(tree, plain):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("adapt", ADAPT)
def test_critics_never_see_scoring_text_or_later_actions(adapt: str) -> None:
    base = tiny("llama")
    texts, thoughts = batch()
    critic, frozen = critic_of(base, adapt)
    values = critic.values(texts, thoughts, frozen.read(texts, thoughts))
    ahead = texts.tokens_BS.clone()
    ahead[0, 15:] = (ahead[0, 15:] + 1) % VOCABULARY
    later = TextBatch(ahead, texts.document_BS, texts.positions_BP, texts.items_BP)
    assert critic.values(later, thoughts, frozen.read(later, thoughts)).equal(values)
    tokens = thoughts.tokens_BRT.clone()
    tokens[..., 2] = (tokens[..., 2] + 1) % VOCABULARY
    other = Thoughts(tokens, *(getattr(thoughts, n) for n in ("length_BR", "valid_BR", "closed_BR", "log_q_BRT")))
    changed = critic.values(texts, other, frozen.read(texts, other))
    assert changed[..., :3].equal(values[..., :3])
    assert not changed[..., 3].equal(values[..., 3])


@pytest.mark.parametrize("adapt", ["head", "probe", "top", "lora"])
def test_frozen_part_is_computed_once_for_both_critics_and_all_passes(adapt: str) -> None:
    base = tiny("llama", torch.float32)
    texts, thoughts = batch()
    chosen = settings(adapt)
    pair, frozen = build_pair(base, PLAN, chosen, seed=5), FrozenBase(base, PLAN, chosen)
    # The engine stands in for `forward` of the blocks it skips; what counts is how often the first block computes.
    computed: list[int] = []
    base.model.layers[0].mlp.register_forward_hook(lambda *_: computed.append(1))
    shared = frozen.read(texts, thoughts)
    assert len(computed) == 1
    for _ in range(3):
        for critic in pair:
            critic.values(texts, thoughts, shared).sum().backward()
    assert len(computed) == 1
    part = shared.rows(slice(1, 2))
    row = critic.values(texts.rows(1, 2), thoughts.rows(1, 2), part)
    torch.testing.assert_close(row, critic.values(texts, thoughts, shared)[1:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adapt", ADAPT)
def test_pair_differs_by_seed_and_repeats_exactly(adapt: str) -> None:
    base = tiny("llama", torch.float32)
    texts, thoughts = batch()
    chosen = settings(adapt)
    shared = FrozenBase(base, PLAN, chosen).read(texts, thoughts)
    first, second = build_pair(base, PLAN, chosen, seed=5)
    again, _ = build_pair(base, PLAN, chosen, seed=5)
    assert not first.values(texts, thoughts, shared).equal(second.values(texts, thoughts, shared))
    assert first.values(texts, thoughts, shared).equal(again.values(texts, thoughts, shared))
    assert {parameter.dtype for _, parameter in first.head.named_parameters()} == {torch.float32}


@pytest.mark.parametrize("adapt", ADAPT)
def test_state_saved_files_and_copies_give_the_same_values(adapt: str, tmp_path: Path) -> None:
    base = tiny("llama", torch.float32)
    texts, thoughts = batch()
    chosen = settings(adapt)
    shared = FrozenBase(base, PLAN, chosen).read(texts, thoughts)
    pair = build_pair(base, PLAN, chosen, seed=5)
    for critic in pair:
        optimizer = MasterOptimizer(critic.trainable(), lr=1e-2)
        for _ in range(3):
            (critic.values(texts, thoughts, shared) - 1).square().sum().backward()
            optimizer.step()
    wanted = [critic.values(texts, thoughts, shared) for critic in pair]
    assert copy.deepcopy(pair[0]).values(texts, thoughts, shared).equal(wanted[0])
    frozen_names = {name for name, _ in pair[0].named_parameters()} - {name for name, _ in pair[0].trainable()}
    assert bool(frozen_names) == (adapt == "lora")
    assert set(pair[0].state_dict()) == {name for name, _ in pair[0].trainable()}

    store = CheckpointStore(tmp_path / "run")
    store.save({"critics": [critic.state_dict() for critic in pair]})
    found = store.newest().checkpoint
    assert found is not None
    save_critics(tmp_path / "critics", pair)
    for way in ("checkpoint", "files"):
        fresh = build_pair(base, PLAN, chosen, seed=99)
        if way == "files":
            load_critics(tmp_path / "critics", fresh)
        else:
            for critic, state in zip(fresh, found.tree["critics"]):
                critic.load_state_dict(state)
        assert all(critic.values(texts, thoughts, shared).equal(value) for critic, value in zip(fresh, wanted))
    with pytest.raises(RuntimeError, match="Missing key"):
        pair[0].load_state_dict({})


def test_saved_critics_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    base = tiny("llama", torch.float32)
    pair = build_pair(base, PLAN, settings("top"))
    save_critics(tmp_path / "critics", pair)
    with pytest.raises(UserError, match="already exists"):
        save_critics(tmp_path / "critics", pair)
    before = copy.deepcopy(pair[0].state_dict())
    above = settings("top", features="policy")
    save_critics(tmp_path / "above", build_pair(base, PLAN, above))
    with pytest.raises(UserError, match="saved with stands_on = policy, this run has stands_on = base"):
        load_critics(tmp_path / "above", pair)
    for other in (settings("full"), settings("top", bounded=True), CriticSettings(adapt="top", blocks=1, width=8)):
        with pytest.raises(UserError, match="use the settings") as error:
            load_critics(tmp_path / "critics", build_pair(base, PLAN, other))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="cannot be loaded"):
        load_critics(tmp_path / "nowhere", pair)
    weights = (tmp_path / "critics" / "critic-2.safetensors").read_bytes()
    (tmp_path / "critics" / "critic-2.safetensors").write_bytes(weights[:-10])
    with pytest.raises(UserError, match="cannot be loaded"):
        load_critics(tmp_path / "critics", pair)
    assert all(before[name].equal(value) for name, value in pair[0].state_dict().items())


def test_exact_weights_are_saved_when_given(tmp_path: Path) -> None:
    base = tiny("llama", torch.bfloat16)
    pair = build_pair(base, PLAN, settings("top"))
    optimizers = [MasterOptimizer(critic.trainable(), lr=1e-6) for critic in pair]
    texts, thoughts = batch()
    shared = FrozenBase(base, PLAN, settings("top")).read(texts, thoughts)
    for critic, optimizer in zip(pair, optimizers):
        values = critic.values(texts, thoughts, shared)
        assert values.dtype == torch.float32
        values.sum().backward()
        optimizer.step()
    masters = [optimizer.masters() for optimizer in optimizers]
    save_critics(tmp_path / "exact", pair, masters)
    wide = build_pair(tiny("llama", torch.float32), PLAN, settings("top"), seed=3)
    load_critics(tmp_path / "exact", wide)
    for critic, exact in zip(wide, masters):
        assert all(value.equal(exact[name]) for name, value in critic.state_dict().items())


@pytest.mark.parametrize("width", [0, 8])
def test_value_head_knows_the_step_and_keeps_its_bound(width: int) -> None:
    features = torch.randn(2, 3, T, 16, generator=torch.Generator().manual_seed(1))
    step = torch.arange(T)
    head = ValueHead(16, T, InitialWeights(1, "head"), width=width, bound=6.0)
    assert head(features, step).abs().max() < 0.2
    same = features[:, :, :1].expand(-1, -1, T, -1)
    assert head(same, step).std(dim=-1).min() > 0
    with torch.no_grad():
        head.last.weight.mul_(1e5)
    values = head(features, step)
    assert values.abs().max() <= 6.0
    assert values.abs().max() > 5.9
    assert ValueHead(16, T, InitialWeights(1, "head"), width=width)(features.bfloat16(), step).dtype == torch.float32


@pytest.mark.parametrize("adapt", ADAPT)
def test_every_kind_can_fit_returns(adapt: str) -> None:
    """A return that depends on the last action read and on the step is learnt from single observations."""
    base = tiny("llama", torch.float32)
    texts, thoughts = batch()
    critic, frozen = critic_of(base, adapt)
    shared = frozen.read(texts, thoughts)
    returns = torch.randn(B, R, T, generator=torch.Generator().manual_seed(3)) * thoughts.mask_BRT
    multipliers = {"head": 1.0, "body": 0.3}
    optimizer = MasterOptimizer(critic.trainable(), lr=3e-2, lr_multipliers=multipliers)
    for _ in range(60):
        (critic.values(texts, thoughts, shared) - returns).square().sum().backward()
        optimizer.step(divide_by=float(thoughts.mask_BRT.sum()))
    left = (critic.values(texts, thoughts, shared) - returns).square().sum() / returns.square().sum()
    assert left < 0.1


def test_head_warm_up_reads_features_once_and_leaves_the_blocks() -> None:
    base = tiny("llama", torch.float32)
    texts, thoughts = batch()
    critic, frozen = critic_of(base, "full")
    shared = frozen.read(texts, thoughts, features=False)
    assert shared.features_BRTD is None
    assert shared.lower is None
    with torch.no_grad():
        features = critic.features(texts, thoughts, shared)
    output = critic.evaluate(features, thoughts.mask_BRT)
    assert output.values_BRT.equal(critic.values(texts, thoughts, shared))
    assert output.hidden_BRTE.shape == (B, R, T, 8)
    output.values_BRT.sum().backward()
    assert all(parameter.grad is None for name, parameter in critic.trainable() if name.startswith("body"))
    assert all(parameter.grad is not None for name, parameter in critic.trainable() if name.startswith("head"))


def test_wrongly_read_base_is_refused() -> None:
    base = tiny("llama", torch.float32)
    texts, thoughts = batch()
    shared = FrozenBase(base, PLAN, settings("full")).read(texts, thoughts, features=False)
    for adapt in ("head", "probe", "top"):
        with pytest.raises(ValueError):
            Critic(base, PLAN, settings(adapt), initial=InitialWeights(0, "critic")).values(texts, thoughts, shared)


def test_more_blocks_than_there_are_means_all_of_them() -> None:
    base = tiny("llama", torch.float32)
    texts, thoughts = batch()
    chosen = CriticSettings(adapt="top", blocks=99, width=8)
    critic = Critic(base, PLAN, chosen, initial=InitialWeights(0, "critic"))
    full = Critic(base, PLAN, settings("full"), initial=InitialWeights(0, "critic"))
    shared = FrozenBase(base, PLAN, chosen).read(texts, thoughts)
    assert critic.values(texts, thoughts, shared).equal(full.values(texts, thoughts, shared))


def test_learned_delimiters_of_critics_stay_where_they_started() -> None:
    base = tiny("llama", torch.float32)
    plan = ThoughtPlan(length=T, checkpoints=(T,), horizon=3, open_ids=(1, 2), close_ids=(2,), learned=True)
    texts, thoughts = batch()
    for adapt in ADAPT:
        critic = Critic(base, plan, settings(adapt), initial=InitialWeights(0, "critic"))
        critic.values(texts, thoughts, FrozenBase(base, plan, settings(adapt)).read(texts, thoughts)).sum().backward()
        assert critic.tree is None or critic.tree.delimiters is not None
        if critic.tree is not None and critic.tree.delimiters is not None:
            assert critic.tree.delimiters.weight_2D.grad is None


def test_lora_starts_at_zero_and_is_its_formula() -> None:
    linear = torch.nn.Linear(5, 3)
    wrapped = LoraLinear(copy.deepcopy(linear), torch.randn(2, 5), 2.0)
    x = torch.randn(7, 5)
    assert wrapped(x).equal(linear(x))
    with torch.no_grad():
        wrapped.up.normal_()
    expected = x @ (linear.weight + 2.0 * wrapped.up @ wrapped.down).T + linear.bias
    torch.testing.assert_close(wrapped(x), expected)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    assert with_lora(layers, 1, 1.0, InitialWeights(0, "updates")) == 2
