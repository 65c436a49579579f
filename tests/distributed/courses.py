"""A few windows of any method in float64, by any number of processes: thoughts, gradients and decisions."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tfive.cli.evaluate_gains import parse_corpus, positions_of
from tfive.config.config import Config
from tfive.distributed.world import World
from tfive.evaluate.diagnostics import SampleSize, diagnose, sample_texts
from tfive.evaluate.headroom import HeadroomTexts, measure
from tfive.inference.thought_model import ThoughtModel
from tfive.methods.method import Method
from tfive.models.load import Loaded, load_model
from tfive.rl.gate import Gate
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.trajectory import Trajectories
from tfive.telemetry import Silent
from tfive.text.prepared import PreparedCorpus
from tfive.text.settings import KINDS
from tfive.training import build
from tfive.training.build import Assembly
from tfive.training.corpus import corpus_of
from tfive.training.positions import move_positions
from tfive.training.warmstart import warm_start
from tfive.training.warmstart_kept import Rounds
from tiny import configure


class Heard(Silent):
    """Keeps the events: every decision that a method takes is one."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, what: str, detail: str, window: int | None = None) -> None:
        self.events.append(f"{window} {what}: {_rounded(detail)}")


def course(world: World, folder: str, overrides: list[str], name: str = "course", windows: int = 2) -> dict[str, Any]:
    """What a run of so many windows came to, measured on the way."""
    config = configure(Path(folder), *overrides, f"window.windows={windows}")
    heard, thoughts = Heard(), _Thoughts()
    loaded = _exact(config)
    corpus = corpus_of(config, loaded=loaded)
    kept = Path(folder) / f"{name}-{world.size}"
    # By one process it is not disturbed: a warm start that stops and goes on must come to the same.
    stopped = name == "warm start" and world.size > 1
    if stopped:
        _stopped_warm_start(config, corpus, heard, kept, world)
    warmed = warm_start(config, loaded, corpus, heard, kept, world)
    went_on = [event for event in heard.events if "going on after round 1 of 2" in event]
    heard.events = [event for event in heard.events if event not in went_on]
    moved = move_positions(config, loaded, corpus, heard, kept, warmed, world)
    assembly = _exactly_built(config, loaded, corpus, heard, warmed, world, moved)
    thoughts.listen(assembly)
    gradients, ahead = _gradients(assembly), _ahead(assembly)
    method, phases, reports = assembly.method, [], []
    while not method.finished(windows):
        phases.append(method.advance())
        if method.closed:
            found, _ = assembly.development.measure(assembly.reader, assembly.gate)
            reports.append(
                _numbers(method) | {f"develop/{name}": found[name] for name in ("content_gain", "thought_gain")}
            )
    return {
        "phases": phases,
        "events": heard.events,
        "thoughts": thoughts.digests,
        "gradients": gradients,
        "ahead": ahead,
        "held": _held(assembly),
        "reports": reports,
        "weights": _sums(dict(assembly.actor.optimizer.whole_masters()).values()),
        "positions": None if moved is None else moved.report["digest"],
        "warmstart": None if warmed is None else _leaves(warmed.report),
        "went_on": len(went_on),
    }


def _stopped_warm_start(config: Config, corpus: PreparedCorpus, heard: Heard, kept: Path, world: World) -> None:
    """A warm start that ends when its first round has been saved."""
    save = Rounds.save

    def last(rounds: Rounds, state: dict[str, Any]) -> None:
        save(rounds, state)
        raise InterruptedError

    Rounds.save = last  # type: ignore[assignment, method-assign]
    try:
        warm_start(config, _exact(config), corpus, heard, kept, world)
    except InterruptedError:
        return
    finally:
        Rounds.save = save  # type: ignore[method-assign]
    raise AssertionError("the warm start saved no round")


def _exact(config: Config) -> Loaded:
    loaded = load_model(config.model.name, device="cpu", dtype=torch.float32)
    loaded.model.double()
    return loaded


def _exactly_built(*given: Any) -> Assembly:
    """What `build` makes, with critics' heads and reading gates in float64 like everything else."""
    pair, parts = build.build_pair, build.begun_parts

    def exact(*arguments: Any, **named: Any) -> Any:
        return [critic.double() for critic in pair(*arguments, **named)]

    def exact_parts(*arguments: Any, **named: Any) -> Any:
        delimiters, gates = parts(*arguments, **named)
        return delimiters, None if gates is None else gates.double()

    build.build_pair, build.begun_parts = exact, exact_parts
    try:
        return build.build(*given)
    finally:
        build.build_pair, build.begun_parts = pair, parts


def _held(assembly: Assembly) -> dict[str, int]:
    """Bytes of weights and moments that this process has of each role, beside the frozen base."""
    base = {weight.data_ptr() for weight in assembly.base.model.parameters()}
    critics = [] if assembly.critics is None else list(zip(assembly.critics.critics, assembly.critics.optimizers))
    owners: list[tuple[str, nn.Module, MasterOptimizer]] = [
        ("actor", assembly.actor.engine.model, assembly.actor.optimizer)
    ]
    owners += [(f"critic {n}", critic, optimizer) for n, (critic, optimizer) in enumerate(critics, 1)]
    found = {}
    for name, module, optimizer in owners:
        tensors = [weight for weight in module.parameters() if weight.device.type != "meta"]
        tensors += [one for slot in optimizer._slots for one in (slot.weights, *(slot.moments or ())[:2])]
        own = {one.data_ptr(): one.nbytes for one in tensors if one.data_ptr() not in base}
        found[name] = sum(own.values())
    return found


def _ahead(assembly: Assembly) -> list[str]:
    """The roles of sets that the actor's processes draw while critics are fitted."""
    kept: list[str] = []
    rollout, draw_ahead = assembly.method.parts.rollout, assembly.method.parts.rollout.draw_ahead

    def heard(draw: Any) -> bool:
        drawn = draw_ahead(draw)
        kept.extend([draw.role] * drawn)
        return drawn

    rollout.draw_ahead = heard
    return kept


class _Thoughts:
    """A digest of every set of thoughts that is drawn."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def listen(self, assembly: Assembly) -> None:
        rollout, collect = assembly.method.parts.rollout, assembly.method.parts.rollout.collect

        def heard(*given: Any, **named: Any) -> Trajectories:
            found = collect(*given, **named)
            tokens = found.thoughts.tokens_BRT.masked_fill(~found.mask_BRT, -1)
            self.digests.append(hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16])
            return found

        rollout.collect = heard


def _gradients(assembly: Assembly) -> dict[str, list[list[float]]]:
    """A few numbers of every summed gradient before it is clipped, by update: of the actor and of each critic."""
    critics = [] if assembly.critics is None else assembly.critics.optimizers
    owners = {"actor": assembly.actor.optimizer} | {f"critic {n}": one for n, one in enumerate(critics, 1)}
    kept: dict[str, list[list[float]]] = {name: [] for name in owners}
    for name, optimizer in owners.items():
        _listen(optimizer, kept[name])
    return kept


def _listen(optimizer: MasterOptimizer, kept: list[list[float]]) -> None:
    add = optimizer._sum_over_processes

    def heard() -> None:
        add()
        whole, found = optimizer.shards, list(optimizer.gradients())
        kept.append(_sums(one if whole is None else whole.gathered(name, one) for name, one in found))

    optimizer._sum_over_processes = heard  # type: ignore[method-assign]


def _sums(tensors: Any) -> list[float]:
    """Of each tensor its sum, its square sum and one weighted sum."""
    found = []
    for tensor in tensors:
        flat = tensor.detach().double().flatten()
        found += [
            float(flat.sum()),
            float(flat.square().sum()),
            float(flat @ torch.linspace(-1, 2, len(flat)).double()),
        ]
    return found


def _numbers(method: Method[Any]) -> dict[str, float]:
    return _leaves(method.report)


def _leaves(value: Any, path: str = "") -> dict[str, float]:
    if isinstance(value, bool | int | float):
        return {path: float(value)}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name: leaf for key, one in pairs for name, leaf in _leaves(one, f"{path}/{key}").items()}


def _rounded(detail: str) -> str:
    """An event as it was said."""
    return detail


def courses(world: World, folder: str, cases: dict[str, list[str]]) -> dict[str, Any]:
    """`course` for every case, and what evaluations say of the untrained model; two processes are enough for that."""
    found = {name: course(world, folder, overrides, name) for name, overrides in cases.items()}
    return found | ({EVALUATED: evaluated(world, folder)} if world.size <= 2 else {})


EVALUATED = "gains and headroom"


def evaluated(world: World, folder: str) -> dict[str, float]:
    """Gains and headroom on seven texts, with a gate and positions by entropy, and a critic that foresees them."""
    config = configure(Path(folder))
    loaded = _exact(config)
    gate = Gate(loaded.model.config.hidden_size, config.gate, seed=1, device=torch.device("cpu"))
    model = ThoughtModel(loaded.model, loaded.tokenizer, config.thought, config.sampling, gate.gate)
    size, corpus = SampleSize(7, 20, 2, 1), parse_corpus([f"{folder}/corpus.jsonl"])
    sample = sample_texts(corpus, model, positions_of(2, 0.5, ""), size, world)
    gains = diagnose(model, sample, size, loaded.model, world)
    texts = HeadroomTexts(sample.texts, sample.kind_BP, tuple(KINDS), sample.source_B, {})
    critic = config.critic.model_copy(update={"passes": 1})
    headroom = measure(model, texts, many=3, seed=1, rows=8, critic=critic, world=world)
    return _leaves({"gains": gains, "headroom": headroom, "places": sample.texts.positions_BP.tolist()})
