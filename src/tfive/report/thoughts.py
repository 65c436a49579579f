"""The thoughts a run kept, as the columns of a page's explorer; and what they say of the critics.

All numbers of the page are integers of a stated size. A page has a size too: every item keeps its thoughts and its
gains, and as many items as fit keep their tokens' detail, the most telling ones first.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from tfive.report.record import RunRecord

EXPLORER, TEXTS = "explorer", "texts.safetensors"
GAINS = ("thought_gain", "content_gain", "other_gain", "empty_gain", "gain_vs_base", "mixed_gain")
LOSSES = ("without", "own", "other", "empty")
QUANTITIES = {"gain": 0.001, "loss": 0.01, "value": 0.01, "weight": 0.01}
ALL_AT_ONCE = 2000
"""So many items are tried with everything before anything is left out."""
ROOM_FOR_DETAIL = 0.75
"""Share of the bytes that all items' thoughts and gains may take; the rest is for tokens' detail."""
SAMPLE = 200
"""Items by which the size of detail is estimated."""
MANY = 4000
"""With more items than this, gains are kept to a hundredth of a nat."""
BINS = 10
"""Bins of a calibration plot."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Kept:
    """One file of the explorer: its arrays, and what its header says."""

    arrays: dict[str, Array]
    about: dict[str, Any]

    @staticmethod
    def read(path: Path) -> Kept:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get("explorer", "{}"))
            return Kept({name: file.get_tensor(name) for name in file.keys()}, about)  # noqa: SIM118

    def pieces(self) -> list[str]:
        """The table of strings."""
        content, ends = self.arrays["pieces"].tobytes(), self.arrays["piece_ends"].tolist()
        return [content[begin:end].decode("utf-8", "replace") for begin, end in zip([0, *ends], ends)]

    @property
    def mask_IT(self) -> npt.NDArray[np.bool_]:
        """Which actions there are."""
        length_I, steps = self.arrays["length"], self.arrays["tokens"].shape[1]
        mask: npt.NDArray[np.bool_] = np.arange(steps)[None] < length_I[:, None]
        return mask


@dataclass(frozen=True)
class Thoughts:
    """Everything a run kept: the places, and one to three measurements of them in order."""

    label: str
    seed: int
    places: Kept
    moments: dict[int, Kept]
    finished: bool

    @property
    def count(self) -> int:
        return len(self.places.arrays["item"])


def read_thoughts(record: RunRecord) -> Thoughts | None:
    """What a run kept; None for one that kept nothing, or not yet."""
    folder = record.folder / EXPLORER
    if not (folder / TEXTS).is_file():
        return None
    moments = {}
    for path in sorted(folder.glob("window-*.safetensors")):
        try:
            moments[int(path.stem.removeprefix("window-"))] = Kept.read(path)
        except FileNotFoundError:
            continue  # a run that goes on has just replaced it by a newer one
    if not moments:
        return None
    return Thoughts(record.run.label, record.seed, Kept.read(folder / TEXTS), moments, record.run.state == "done")


class Strings:
    """The string table of a page: each string once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def renumbered(self, table: list[str], tokens: Array) -> Array:
        """Tokens of one table as tokens of this one."""
        lookup = np.asarray([self.numbers.setdefault(text, len(self.numbers)) for text in table], np.int64)
        found: Array = lookup[tokens] if len(lookup) else tokens
        return found


def explorer(found: Thoughts, most_bytes: int) -> dict[str, Any]:
    """The columns of the explorer in at most so many bytes once packed.

    What does not fit is left out in this order: the tokens' detail of the least telling items, the measurement
    half-way, and at last items; how many is said in `left_out`.
    """
    whole, nothing = found.count, np.zeros(0, np.int64)
    if whole <= ALL_AT_ONCE:
        columns = _columns(found, np.arange(whole))
        if packed_size(columns) <= most_bytes:
            return columns
    bare = packed_size(_columns(found, nothing))
    if bare > ROOM_FOR_DETAIL * most_bytes and len(found.moments) > 2:
        ends = min(found.moments), max(found.moments)
        found = replace(found, moments={window: found.moments[window] for window in ends})
        bare = packed_size(_columns(found, nothing))
    if bare > ROOM_FOR_DETAIL * most_bytes:
        found = _fewer(found, _telling(found, int(found.count * ROOM_FOR_DETAIL * most_bytes / bare)))
        bare = packed_size(_columns(found, nothing))
    some = _telling(found, min(SAMPLE, found.count))
    each = max(1.0, (packed_size(_columns(found, some)) - bare) / len(some))
    detailed = min(found.count, int(max(0, most_bytes - bare) / each))
    while True:
        columns = _columns(found, _telling(found, detailed)) | {"left_out": whole - found.count}
        if not detailed or packed_size(columns) <= most_bytes:
            return columns
        detailed = int(detailed * 0.85)


def _fewer(found: Thoughts, kept: npt.NDArray[np.int64]) -> Thoughts:
    """The same with some of the items, and the texts that hold them."""
    places = dict(found.places.arrays)
    texts, number = np.unique(places["text"][kept], return_inverse=True)
    for name in ("item", "position", "kind", "source"):
        places[name] = places[name][kept]
    for name in ("tokens", "document", "sequence"):
        places[name] = places[name][texts]
    places["text"] = number
    moments = {
        window: Kept({name: _rows(name, value, kept) for name, value in moment.arrays.items()}, moment.about)
        for window, moment in found.moments.items()
    }
    return replace(found, places=Kept(places, found.places.about), moments=moments)


def _rows(name: str, value: Array, kept: npt.NDArray[np.int64]) -> Array:
    if name in ("pieces", "piece_ends"):
        return value
    rows: Array = value[:, kept] if name in ("values", "advantages") else value[kept]
    return rows


def packed_size(content: Any) -> int:
    """Bytes of some content as a page carries it, before base64."""
    return len(gzip.compress(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(), 6, mtime=0))


def _telling(found: Thoughts, count: int) -> npt.NDArray[np.int64]:
    """The items whose detail is kept: by turns those of largest content gain, of largest harm, and any others."""
    if count >= found.count:
        return np.arange(found.count)
    last = found.moments[max(found.moments)].arrays
    order_I = np.argsort(-last["content_gain"].astype(np.float64), kind="stable")
    harm_I = np.argsort(last["thought_gain"].astype(np.float64), kind="stable")
    spread_I = np.argsort((np.arange(found.count) * 2654435761) % 2**32, kind="stable")
    turns = np.stack([order_I, harm_I, spread_I], 1).reshape(-1)
    _, first = np.unique(turns, return_index=True)
    return np.sort(turns[np.sort(first)][:count])


def _columns(found: Thoughts, detailed: npt.NDArray[np.int64]) -> dict[str, Any]:
    places, about, strings = found.places.arrays, found.places.about, Strings()
    strings.numbers[""] = 0
    tokens = strings.renumbered(found.places.pieces(), places["tokens"])
    detail_I = np.full(found.count, -1)
    detail_I[detailed] = np.arange(len(detailed))
    first = np.unique(places["text"], return_index=True)[1]
    windows = sorted(found.moments)
    quantities = QUANTITIES | ({"gain": 0.01} if found.count > MANY else {})
    snapshots = [_snapshot(found.moments[window], strings, detailed, quantities["gain"]) for window in windows]
    return {
        "label": found.label,
        "seed": found.seed,
        **{name: about.get(name) for name in ("horizon", "length", "checkpoints", "thinks", "critics")},
        "gate": any("gate" in one.arrays for one in found.moments.values()),
        "windows": windows,
        "names": _names(windows, about, found.finished),
        "sources": about.get("sources", []),
        "kinds": about.get("kinds", []),
        "pieces": list(strings.numbers),
        "texts": {
            "id": places["sequence"].tolist(),
            "source": places["source"][first].tolist(),
            "offsets": [number * tokens.shape[1] for number in range(len(tokens) + 1)],
            "tokens": tokens.reshape(-1).tolist(),
            "documents": [_run_lengths(row) for row in places["document"]],
        },
        "items": {
            "id": places["item"].tolist(),
            "text": places["text"].tolist(),
            "position": places["position"].tolist(),
            "kind": places["kind"].tolist(),
            "source": places["source"].tolist(),
            "detail": detail_I.tolist(),
        },
        "quantities": quantities,
        "snapshots": snapshots,
        "left_out": 0,
    }


def _names(windows: list[int], about: dict[str, Any], finished: bool) -> list[str]:
    """What each measurement is called."""
    newest = max(windows)
    names = []
    for window in windows:
        end = window == newest and (finished or window == about.get("windows"))
        half = window == about.get("half_way")
        names.append("start" if window == 0 else "end" if end else "half-way" if half else "latest")
    return names


def _run_lengths(values: Array) -> list[int]:
    edges = np.flatnonzero(np.diff(values)) + 1
    counts = np.diff([0, *edges, len(values)])
    return [int(n) for pair in zip(values[[0, *edges]], counts) for n in pair]


def _integers(value: Array, quantity: float) -> list[int]:
    """Numbers as whole multiples of a quantity; what is no number counts as 0."""
    scaled = np.nan_to_num(value.astype(np.float64) / quantity, posinf=0.0, neginf=0.0)
    return np.rint(scaled).astype(np.int64).reshape(-1).tolist()


def _snapshot(moment: Kept, strings: Strings, detailed: npt.NDArray[np.int64], gain: float) -> dict[str, Any]:
    found = moment.arrays
    tokens_IT = strings.renumbered(moment.pieces(), found["tokens"])
    horizon_IH = np.arange(found["own"].shape[1])[None] < found["horizon"][:, None]
    gate_I = None
    if "gate" in found:
        total = np.where(horizon_IH, found["gate"].astype(np.float64), 0.0).sum(1)
        gate_I = _integers(total / np.maximum(found["horizon"], 1), QUANTITIES["weight"])
    return {
        "length": found["length"].tolist(),
        "closed": found["closed"].tolist(),
        "tokens": tokens_IT[moment.mask_IT].tolist(),
        **{name: _integers(found[name], gain) if name in found else None for name in GAINS},
        "gate": gate_I,
        "detail": _detail(found, detailed, horizon_IH[detailed], moment.mask_IT[detailed]) if len(detailed) else None,
    }


def _detail(found: dict[str, Array], rows: Array, horizon_DH: Array, mask_DT: Array) -> dict[str, Any]:
    """Every token of the detailed items, one after another."""

    def tokens(name: str, quantity: str, mask: Array) -> list[int] | None:
        return _integers(found[name][rows][mask], QUANTITIES[quantity]) if name in found else None

    def critics(name: str) -> list[list[int]] | None:
        return [_integers(one[rows][mask_DT], QUANTITIES["value"]) for one in found[name]] if name in found else None

    return {
        "horizon": found["horizon"][rows].tolist(),
        **{name: tokens(name, "loss", horizon_DH) for name in LOSSES},
        "gate": tokens("gate", "weight", horizon_DH),
        "values": critics("values"),
        "advantages": critics("advantages"),
        "weight": tokens("weight", "weight", mask_DT),
        "mixed": tokens("mixed", "value", mask_DT),
        "returns": tokens("returns", "value", mask_DT),
    }


def calibration(found: Thoughts | None) -> list[dict[str, Any]]:
    """Mean return against mean prediction of each critic at each moment, in bins of equal count."""
    plots: list[dict[str, Any]] = []
    if found is None:
        return plots
    for window, moment in found.moments.items():
        if "values" not in moment.arrays:
            continue
        returned = moment.arrays["returns"].astype(np.float64)[moment.mask_IT]
        text = np.broadcast_to(found.places.arrays["text"][:, None], moment.mask_IT.shape)[moment.mask_IT]
        for critic, values in enumerate(moment.arrays["values"]):
            predicted = values.astype(np.float64)[moment.mask_IT]
            parts = [part for part in np.array_split(np.argsort(predicted, kind="stable"), BINS) if len(part)]
            means = np.asarray([returned[part].mean() for part in parts])
            errors = np.asarray([_clustered_error(returned[part], text[part]) for part in parts])
            plots.append(
                {
                    "window": window,
                    "critic": critic,
                    "predicted": [round(float(predicted[part].mean()), 5) for part in parts],
                    "returned": np.round(means, 5).tolist(),
                    "low": np.round(means - 1.96 * errors, 5).tolist(),
                    "high": np.round(means + 1.96 * errors, 5).tolist(),
                    "count": [len(part) for part in parts],
                }
            )
    return plots


def _clustered_error(value_N: Array, text_N: Array) -> float:
    """Standard error of a mean with texts as the independent units; 0 for one text, which shows no spread."""
    _, index_N = np.unique(text_N, return_inverse=True)
    sums_J = np.bincount(index_N, weights=value_N - value_N.mean())
    units = len(sums_J)
    return float(np.sqrt(np.square(sums_J).sum() * units / (units - 1)) / len(value_N)) if units > 1 else 0.0


def weight_histograms(found: Thoughts | None) -> list[dict[str, Any]]:
    """How the mixing weight lies on the kept thoughts at each moment."""
    edges = np.linspace(0, 1, 21)
    plots = []
    for window, moment in found.moments.items() if found is not None else ():
        if "weight" in moment.arrays:
            weight = moment.arrays["weight"].astype(np.float64)[moment.mask_IT]
            count = np.histogram(np.clip(weight, 0, 1), edges)[0]
            plots.append({"window": window, "edges": np.round(edges, 2).tolist(), "count": count.tolist()})
    return plots
