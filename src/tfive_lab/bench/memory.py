"""Peak memory of whole windows of training, phase by phase, beside what `tfive doctor` predicts; and seconds of a step.

Models of a named shape have random weights in the compute precision, made on the device itself. On a GPU the
allocator's own count is read; on a CPU every tensor's memory is counted from its making to its end, which is what the
estimate is about as well.
"""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.models.load import Loaded, load_tokenizer, tokenizer_fingerprint
from tfive.models.precision import choose_device, choose_dtype
from tfive.models.shape import known_shapes, shape_from
from tfive.rl.qualify import Qualifier
from tfive.text.prepared import PreparedCorpus
from tfive.training.build import build
from tfive.training.corpus import corpus_of
from tfive.training.memory import FEATURES, Estimate, estimate
from tfive_lab.bench.fit import fitted, smaller
from tfive_lab.bench.step import SMALL, Forced, StepWork, configure
from tfive_lab.bench.timed import Timed, device_clock
from tfive_lab.bench.work import NANO, SHAPES, random_model

HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096,
    "tie_word_embeddings": False, "full_attention_interval": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
"""A small model made as Qwen3.5 is, for trials without a GPU."""
LOCAL = {"nano": NANO, "nano-hybrid": HYBRID}
LORA = ("actor.adapt=lora", "critic.adapt=lora", "critic.blocks=4", "optimizer.lr=1e-4")
FITTING: dict[str, Sequence[str]] = {
    "qwen3.5-9b": LORA,
    "qwen3-4b": ("optimizer.moments=bfloat16",),
    "nano-hybrid": LORA,
}
"""What a shape is trained with unless told otherwise: low-rank updates, or every weight with narrow moments."""


class Meter(Protocol):
    """Counts bytes."""

    def reset(self) -> None:
        """Begin a new peak."""

    def peak(self) -> int:
        """The most bytes since `reset`."""

    def live(self) -> int:
        """Bytes now."""


class CudaMeter:
    """The CUDA allocator's count of tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def live(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))


class TensorMeter(TorchDispatchMode):
    """Bytes of every tensor that an operation made while this mode was on, until its memory is given back."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._live = self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, made)
        return made

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self._sizes:
            self._sizes[place] = storage.nbytes()
            self._live += storage.nbytes()
            self._peak = max(self._peak, self._live)
            weakref.finalize(storage, self._gone, place).atexit = False

    def _gone(self, place: int) -> None:
        self._live -= self._sizes.pop(place, 0)

    def reset(self) -> None:
        self._peak = self._live

    def peak(self) -> int:
        return self._peak

    def live(self) -> int:
        return self._live


class PeakRecorder(Timed):
    """Times phases and keeps the peak of each outermost one."""

    def __init__(self, clock: Callable[[], float], meter: Meter) -> None:
        super().__init__(clock)
        self.meter, self.peaks = meter, dict[str, int]()

    @contextmanager
    def phase(self, name: str, role: str = "all") -> Iterator[None]:
        outermost = not self._open
        if outermost:
            self.meter.reset()
        with super().phase(name, role):
            yield
        if outermost:
            self.peaks[name] = max(self.peaks.get(name, 0), self.meter.peak())


def facts_of(shape: str) -> dict[str, Any]:
    """The configuration of a named shape."""
    if shape in LOCAL:
        return LOCAL[shape]
    if shape not in SHAPES:
        raise UserError(f"shape {shape!r} is not known; use one of {', '.join((*LOCAL, *SHAPES))}")
    facts = known_shapes()
    return facts[next(key for key in facts if key.startswith(SHAPES[shape]))]


def predicted(table: Estimate, phase: str) -> int:
    """Peak bytes of a phase as the estimate has them: what lasts, and the largest pass that the phase makes."""
    transient = {row.role: row.transient for row in table.rows}
    fitting = transient.get("critic 1", 0) + transient.get(FEATURES, 0)
    passes = {"update": transient.get("actor", 0), "fit": max(fitting, transient.get("rollout and scoring", 0))}
    return table.lasting + passes.get(phase, transient.get("rollout and scoring", 0))


def measure(
    config: Config, shape: str, corpus: PreparedCorpus, *, windows: int = 2, deadline: float | None = None
) -> dict[str, Any]:
    """One method: predicted and measured peaks by phase, seconds of the windows; the first window is start-up."""
    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.compute, device)
    table = estimate(config, shape_from(facts_of(shape), shape), on_gpu=device.type == "cuda")
    meter: Any = CudaMeter(device) if device.type == "cuda" else TensorMeter()
    inside: AbstractContextManager[Any] = nullcontext() if device.type == "cuda" else meter
    _cleared(device)
    clock = device_clock(device)
    with inside:
        began = clock()
        tokenizer = load_tokenizer("nano")
        model = random_model(facts_of(shape), device, dtype)
        loaded = Loaded(model, tokenizer, shape, shape, tokenizer_fingerprint(tokenizer))
        made = clock() - began
        recorder = PeakRecorder(clock, meter)
        with recorder:
            assembly = build(config, loaded, corpus, recorder)
            if isinstance(getattr(assembly.method, "qualifier", None), Qualifier):
                rule = config.qualify
                forced = Forced(rule.eta, rule.consecutive, rule.patience, rule.attempts, "strict")
                assembly.method.qualifier = forced  # type: ignore[attr-defined]
            built, seconds = clock() - began - made, list[float]()
            while len(seconds) < windows:
                start = clock()
                assembly.method.advance()
                while not assembly.method.closed:
                    assembly.method.advance()
                seconds.append(clock() - start)
                if deadline is not None and seconds and clock() + seconds[-1] > deadline:
                    break
        found = _report(config, table, recorder, seconds) | {"model_s": round(made, 2), "build_s": round(built, 2)}
        found["lasting"] = {"predicted": table.lasting, "measured": meter.live()}
        if device.type == "cuda":
            found["reserved_bytes"] = int(torch.cuda.max_memory_reserved(device))
        del assembly, loaded, model
    _cleared(device)
    return found


def _cleared(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _report(config: Config, table: Estimate, recorder: PeakRecorder, seconds: list[float]) -> dict[str, Any]:
    steps, peak = config.window.actor_steps, max(recorder.peaks.values())
    spent = recorder.phases()
    return {
        "method": config.method,
        "actor": config.actor.adapt,
        "critics": config.critic.adapt if config.spec.critics else None,
        "moments": config.optimizer.moments,
        "bf16_update": config.optimizer.bf16_update,
        "activation_checkpointing": config.engine.activation_checkpointing,
        "texts_per_pass": config.run.texts_per_pass,
        "texts_per_rollout": config.run.rollout_texts,
        "thought_length": config.thought.length,
        "predicted_bytes": table.total,
        "measured_bytes": peak,
        "predicted_over_measured": round(table.total / peak, 4),
        "phases": {
            name: {"predicted": predicted(table, name), "measured": measured, "seconds": round(spent.get(name, 0.0), 3)}
            for name, measured in recorder.peaks.items()
        },
        "window_s": [round(one, 3) for one in seconds],
        "step_s": round(statistics.median(seconds[1:] or seconds) / steps, 4),
        "steady": len(seconds) > 1,
        "table": [{"role": row.role, "bytes": row.bytes, "how": row.how} for row in table.rows],
    }


def memory_report(
    shape: str,
    methods: Sequence[str] = ("t5", "rlp"),
    works: Sequence[StepWork] | None = None,
    *,
    device: str = "auto",
    compute: str = "auto",
    overrides: Sequence[str] = (),
    windows: int = 2,
    budget: float | None = None,
    room: float | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """All methods at all lengths, the largest passes that are predicted to fit into `room` of the device's memory (as
    configured without one); within `budget` seconds, each an equal share of what is left."""
    place, began = choose_device(device), time.perf_counter()
    works = list(works or (SMALL if shape in LOCAL else StepWork(),))
    chosen = [*FITTING.get(shape, ()), *overrides]
    total = torch.cuda.get_device_properties(place).total_memory if place.type == "cuda" else None
    report: dict[str, Any] = {
        "shape": shape,
        "parameters": shape_from(facts_of(shape), shape).parameters,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "memory": total,
        "versions": {"torch": torch.__version__},
        "overrides": chosen,
        "runs": [],
    }
    corpus = corpus_of(configure("t5", works[0], chosen, str(place), compute))
    left = len(works) * len(methods)
    for work in works:
        for method in methods:
            now = time.perf_counter()
            if budget is not None and now - began > budget:
                report.setdefault("skipped", []).append(f"{method} at T {work.length}")
                continue
            deadline = None if budget is None else now + (budget - (now - began)) / left
            config = configure(method, work, chosen, str(place), compute)
            if room is not None and total is not None:
                config = fitted(config, shape_from(facts_of(shape), shape), room * total)
            report["runs"].append(_kept_going(config, shape, corpus, windows, deadline))
            left -= 1
            if keep is not None:
                keep(report)
    report["seconds"] = round(time.perf_counter() - began, 1)
    return report


def _kept_going(
    config: Config, shape: str, corpus: PreparedCorpus, windows: int, deadline: float | None
) -> dict[str, Any]:
    """`measure`; where memory runs out, again with smaller passes, and at last only what was asked for."""
    asked: list[dict[str, Any]] = []
    for _ in range(3):
        try:
            found = measure(config, shape, corpus, windows=windows, deadline=deadline)
        except torch.OutOfMemoryError as error:
            reason = " ".join(str(error).split())[:300]
        else:
            return found | ({"out_of_memory": asked} if asked else {})
        table = estimate(config, shape_from(facts_of(shape), shape), on_gpu=True)
        asked.append({"predicted_bytes": table.total, "reason": reason})
        config = smaller(config)
        gc.collect()
        torch.cuda.empty_cache()
    return {"method": config.method, "out_of_memory": asked}
