"""`tfive bench step`: seconds of a training step of each method at equal actor items, in one run, on one device.

Every method runs the code of `tfive train` on the same model, text and engine, without checkpoints and development
measurements. Models of a named shape have random weights, whose critics never qualify: every phase runs with its
declared counts, failed tests are overruled, and the report lists them as forced.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tfive.config.config import Config
from tfive.errors import RunFailed, UserError
from tfive.methods.registry import spec_of
from tfive.models.load import Loaded, load_model, load_tokenizer, tokenizer_fingerprint
from tfive.models.precision import choose_device, choose_dtype
from tfive.rl.qualify import Qualifier, Score
from tfive.rl.roles import auxiliary_rollouts
from tfive.text.prepared import PreparedCorpus
from tfive.training.build import Assembly, build
from tfive.training.corpus import corpus_of
from tfive.training.cost import nodes_per_item
from tfive.tree.forward import TreeModel
from tfive_lab.bench.counted import ONE_BLOCK, WHOLE, critic_overrides, row_name
from tfive_lab.bench.fit import smaller, texts_that_fit
from tfive_lab.bench.law_gap import law_gaps
from tfive_lab.bench.step_budget import Budget, TimeSpent
from tfive_lab.bench.step_report import GOAL, protocol_hash, ratios, witness_of
from tfive_lab.bench.timed import Clock, Timed, device_clock
from tfive_lab.bench.work import SHAPES, blocks_of, find_model

VERBS = ("read", "sample", "score", "policy", "features")
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class StepWork:
    """The size of a step: actor items, steps a window, length of thoughts and texts."""

    items: int = 128
    """N, actor items of a step."""
    steps: int = 4
    """Optimizer steps of a window; the actor's set of a window holds `items · steps` items."""
    passes: int = 2
    """Passes over a window's actor set, as in training; `steps` is a multiple of it."""
    length: int = 12
    positions: int = 16
    tokens: int = 512
    horizon: int = 16

    def overrides(self) -> list[str]:
        """The settings this work stands for, on top of the preset that carries the text."""
        thirds = sorted({max(1, round(self.length / 3)), max(1, round(2 * self.length / 3)), self.length})
        texts = -(-self.items * self.steps // self.positions)
        return [
            f"thought.length={self.length}",
            f"thought.checkpoints={thirds}",
            f"thought.horizon={self.horizon}",
            "thought.variable_length=false",
            f"text.sequence_length={self.tokens}",
            f"text.positions.per_text={self.positions}",
            "text.positions.match=0",
            "text.positions.uniform=1.0",
            f"text.sequences.train={max(24, 5 * texts)}",
            f"text.sequences.calibration={max(4, texts)}",
            "text.sequences.development=4",
            "text.sequences.test=2",
            f"run.develop_items={2 * self.positions}",
            f"window.items={self.items * self.steps}",
            f"window.actor_steps={self.steps}",
            f"actor.reuse_passes={self.passes}",
            f"actor.minibatches={self.steps // self.passes}",
        ]


TIMED = (
    "window.qualify=0.25",
    "window.probe=0",
    "gate.passes=0",
    "calibration.cross_fit=false",
    "anchor.conditioned=0.0",
)
"""What is set beside the preset `nano`: a share of fresh qualification thoughts, no gate, no conditioned anchor,
and none of the measurements that are only reported."""
SMALL = StepWork(items=16, steps=4, length=12, positions=6, tokens=128, horizon=5)


class Forced(Qualifier):
    """A qualifier that passes every test, since random weights would fail, and counts those that failed."""

    forced = 0

    def _criterion(self, first: Score, second: Score) -> tuple[bool, str]:
        passed, detail = super()._criterion(first, second)
        self.forced += not passed
        return True, detail if passed else f"forced through: {detail}"


def configure(method: str, work: StepWork, overrides: Sequence[str], device: str, compute: str) -> Config:
    """The configuration of one timed method."""
    placed = [f"model.device={device}", f"model.compute={compute}", f"method={method}"]
    return Config.load("nano", overrides=[*TIMED, *work.overrides(), *overrides, *placed])


def _loaded(shape: str | None, device: torch.device, dtype: torch.dtype) -> Loaded:
    """The embedded model, or a random one of a shape with the embedded tokenizer, whose ids suffice for timing."""
    if shape is None:
        return load_model("nano", device=device, dtype=dtype)
    model, name = find_model(shape, device, dtype)
    tokenizer = load_tokenizer("nano")
    return Loaded(model, tokenizer, name, shape, tokenizer_fingerprint(tokenizer))


def time_method(
    config: Config,
    shape: str | None,
    corpus: PreparedCorpus,
    *,
    windows: int,
    deadline: float | None = None,
    end: float | None = None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Seconds of one method by phase: the first window is start-up, the others are the steady state.

    From the third on, no window begins that would end after `deadline` on the clock (`device_clock` unless given); a
    window that is not over at `end` is left there and counts for nothing.
    """
    device, began = choose_device(config.model.device), time.perf_counter()
    loaded = _loaded(shape, device, choose_dtype(config.model.compute, device))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock = clock or device_clock(device)
    recorder = Timed(clock)
    with recorder:
        assembly = build(config, loaded, corpus, recorder)
        setup_s = time.perf_counter() - began
        if isinstance(getattr(assembly.method, "qualifier", None), Qualifier):
            rule = config.qualify
            assembly.method.qualifier = Forced(rule.eta, rule.consecutive, rule.patience, rule.attempts, "strict")  # type: ignore[attr-defined]
        with _timed_verbs(assembly, recorder) as verbs:
            window_costs = _window_costs(assembly, recorder, verbs, windows, deadline, end, clock)
        if not window_costs:
            raise TimeSpent(f"{config.method}: the time was over before its first window was")
        found = _report(config, assembly, recorder, window_costs)
        found["counted_nodes_per_item"] = nodes_per_item(config, assembly.base.block_count)
        found["law_gaps"] = law_gaps(assembly)
        found["setup_s"] = setup_s
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    del assembly, loaded
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


@contextmanager
def _timed_verbs(assembly: Assembly, recorder: Timed) -> Iterator[dict[str, float]]:
    """Collects the seconds spent in the engine's verbs; nested calls count once, backward passes not at all."""
    spent = dict.fromkeys(VERBS, 0.0)
    depth = [0]

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any, **options: Any) -> Any:
            depth[0] += 1
            began = recorder.seconds
            try:
                return call(*arguments, **options)
            finally:
                depth[0] -= 1
                spent[name] += 0.0 if depth[0] else recorder.seconds - began

        return inner

    engines = {
        id(engine): engine for engine in (assembly.actor.engine, assembly.method.parts.rollout.engine, assembly.reader)
    }
    for engine in engines.values():
        for name in VERBS:
            setattr(engine, name, timed(name, getattr(engine, name)))
    yield spent
    for engine in engines.values():
        for name in VERBS:
            delattr(engine, name)


def _window_costs(
    assembly: Assembly,
    recorder: Timed,
    verbs: dict[str, float],
    windows: int,
    deadline: float | None,
    end: float | None,
    clock: Clock,
) -> list[dict[str, Any]]:
    """Seconds of each window, by phase and by verb of the engine."""
    window_costs: list[dict[str, Any]] = []
    while len(window_costs) < windows:
        before, inside, began = recorder.phases(), dict(verbs), clock()
        assembly.method.advance()
        while not assembly.method.closed:
            if end is not None and clock() > end:
                return window_costs
            assembly.method.advance()
        after, took = recorder.phases(), clock() - began
        phases = {name: after[name] - before.get(name, 0.0) for name in after if name != "admit"}
        window_costs.append(
            {
                "seconds": sum(value for name, value in phases.items() if "/" not in name),
                "phases": phases,
                "verbs": {name: verbs[name] - inside[name] for name in verbs},
            }
        )
        if deadline is not None and len(window_costs) >= 2 and clock() + took > deadline:
            break
    return window_costs


def _report(config: Config, assembly: Assembly, recorder: Timed, window_costs: list[dict[str, Any]]) -> dict[str, Any]:
    steps, items = config.window.actor_steps, config.window.items * len(window_costs)
    steady = window_costs[1:]
    qualifier = getattr(assembly.method, "qualifier", None)
    account = recorder.account()
    auxiliary = auxiliary_rollouts({role: row["trajectories"] for role, row in account["roles"].items()})
    return {
        "method": config.method,
        "group": config.group,
        "config_hash": protocol_hash(config),
        "texts_per_pass": config.run.texts_per_pass,
        "texts_per_rollout": config.run.rollout_texts,
        "activation_checkpointing": config.engine.activation_checkpointing,
        "windows": len(window_costs),
        "critics": _critics_of(config),
        "delta_rule": _rule_of(assembly.actor.engine),
        "steady_step_s": statistics.median(lap["seconds"] for lap in steady) / steps if steady else None,
        "all_in_step_s": statistics.fmean(lap["seconds"] for lap in window_costs) / steps,
        "startup_s": window_costs[0]["seconds"],
        "window_s": [round(lap["seconds"], 4) for lap in window_costs],
        "phases_s": means([lap["phases"] for lap in steady or window_costs]),
        "verbs_s": means([lap["verbs"] for lap in steady or window_costs]),
        "auxiliary_per_item": auxiliary / items,
        "tokens": account["roles"],
        "forced_tests": getattr(qualifier, "forced", 0),
        "events": recorder.events,
    }


def _rule_of(engine: TreeModel) -> dict[str, str] | None:
    """The rule of recurrent layers and why it is this one; None for a model without any."""
    return {"name": engine.rule.name, "reason": engine.rule.reason} if engine.backbone.recurrent else None


def _critics_of(config: Config) -> dict[str, Any] | None:
    """What is adapted of each critic, since it decides most of the cost; None for a method without critics."""
    if not config.spec.critics:
        return None
    own = config.critic
    return {"count": config.spec.critics, "adapt": own.adapt, "width": own.width, "features": own.features} | (
        {"blocks": own.blocks} if own.adapt in ("probe", "top", "lora") else {}
    )


def means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every number over some rows, 0 where a row has none."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: round(statistics.fmean(row.get(name, 0.0) for row in rows), 5) for name in names}


def step_times(
    shape: str | None = None,
    methods: Sequence[str] = ("t5", "rlp"),
    works: Sequence[StepWork] | None = None,
    *,
    device: str = "auto",
    compute: str = "auto",
    windows: int = 3,
    budget: float | None = None,
    overrides: Sequence[str] = (),
    critics: Sequence[str] = (ONE_BLOCK,),
    witness: str | None = None,
    keep: Keep | None = None,
) -> dict[str, Any]:
    """All methods at all lengths, one after the other, those with whole critics last; `keep` gets the report after
    each, so that none is lost.

    A method with critics is timed once with each of `critics` (`counted.critic_overrides`).

    With a `budget` in seconds, each method gets an equal share of what is left for windows beyond its second. None is
    begun that would take longer than what is left, by its counted nodes and the seconds a node of those before, and one
    that does so nevertheless is left at the budget's end.
    """
    if shape is not None and shape not in (*SHAPES, "nano"):
        raise UserError(f"shape {shape!r} is not known; use one of nano, {', '.join(SHAPES)}")
    place, began = choose_device(device), time.perf_counter()
    works = list(works or ((SMALL,) if shape in (None, "nano") else (StepWork(), StepWork(length=64, steps=2))))
    first = configure("t5", works[0], overrides, str(place), compute)
    corpus = corpus_of(first)
    report: dict[str, Any] = {
        "model": "nano" if shape is None else f"{shape} shape (random weights)",
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "compute": str(choose_dtype(compute, place)).removeprefix("torch."),
        "versions": {"torch": torch.__version__},
        "goal": GOAL,
        "witness": witness_of(witness, first),
        "works": [],
    }
    timed = [(row_name(method, one), method, one) for method in methods for one in _kinds(method, critics)]
    pairs = [(number, *one) for number in range(len(works)) for one in timed]
    pairs.sort(key=lambda pair: pair[-1] == WHOLE)  # the dearest last, at any length
    report["works"] = [{"work": asdict(work), "methods": {}} for work in works]
    layers, limit = blocks_of(shape), Budget(budget, len(pairs), began)
    for number, name, method, kind in pairs:
        entry = report["works"][number]
        config = configure(method, works[number], [*critic_overrides(kind), *overrides], str(place), compute)
        nodes = 2 * config.window.items * sum(nodes_per_item(config, layers).values())
        if not limit.allows(nodes):
            entry.setdefault("skipped", []).append(f"{name} ({limit.expected(nodes):.0f} s expected)")
            limit.methods -= 1
            continue
        now, config = time.perf_counter(), texts_that_fit(config, shape, place)
        try:
            entry["methods"][name] = _within_memory(config, shape, corpus, windows, limit.share(), limit.end)
        except TimeSpent as error:
            entry.setdefault("skipped", []).append(str(error))
            break
        limit.book(nodes, time.perf_counter() - now, entry["methods"][name]["setup_s"])
        limit.methods -= 1
        entry["ratios"] = ratios(entry["methods"])
        if keep is not None:
            keep(report)
    report["seconds"] = time.perf_counter() - began
    return report


def _kinds(method: str, critics: Sequence[str]) -> Sequence[str]:
    """The kinds of critics a method is timed with: one of no name where it has none."""
    return critics if spec_of(method).critics else (ONE_BLOCK,)


def _within_memory(
    config: Config,
    shape: str | None,
    corpus: PreparedCorpus,
    windows: int,
    deadline: float | None,
    end: float | None = None,
) -> dict[str, Any]:
    """As `time_method`; where memory runs out, again with smaller passes, at most three times."""
    for attempt in range(4):
        try:
            found = time_method(config, shape, corpus, windows=windows, deadline=deadline, end=end)
            return found | {"out_of_memory": attempt}
        except torch.OutOfMemoryError as error:
            if attempt == 3:
                raise RunFailed(f"{config.method} runs out of memory even with the smallest passes: {error}") from error
        config = smaller(config)
        gc.collect()
        torch.cuda.empty_cache()
    raise AssertionError("unreachable")
