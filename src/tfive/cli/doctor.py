"""What `tfive doctor` reports: the machine, the packages, and whether a configuration fits in memory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tfive import __version__
from tfive.cli.doctor_processes import processes_facts
from tfive.config.config import Config, presets, resolve
from tfive.config.rules import problems
from tfive.errors import UserError
from tfive.extras import install_hint
from tfive.models.shape import ModelShape, find_shape
from tfive.training.disk import room
from tfive.training.larger_passes import larger_passes
from tfive.training.memory import COLUMNS, Estimate, estimate, nodes_of, readable_bytes
from tfive.training.remedies import smaller_passes, smaller_weights
from tfive.training.save_memory import checkpoint_bytes, with_save

CORE = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "typer", "rich", "tomlkit")
OPTIONAL = {
    "gguf": "models in .gguf files",
    "pyarrow": "text in .parquet files",
    "zstandard": "text in .zst files",
    "datasets": "text from the hub",
    "matplotlib": "figures in reports",
    "tensorboard": "TensorBoard metrics",
    "wandb": "W&B metrics",
    "trackio": "trackio metrics",
    "fla": "flash-linear-attention kernels",
}
EXTRAS = {"pyarrow": "parquet", "zstandard": "zstd", "datasets": "hub", "matplotlib": "figures", "fla": "kernels"}

PREPARING = "preparing the text, to see whether it holds enough"

_DISTRIBUTIONS = {"fla": "flash-linear-attention"}


@dataclass(frozen=True)
class Device:
    """One place to compute."""

    name: str
    kind: str
    memory: int | None
    precisions: list[str]


def report(sources: Sequence[str], overrides: Sequence[str], as_json: bool, processes: int | None = None) -> str:
    """The whole report: with a preset or file its memory, needs and duration, without one those of all presets."""
    from tfive.training.progress import ProgressReport, Waiting
    from tfive.training.text_held import lacking

    if processes is not None and not sources:
        raise UserError(f"--processes {processes}: name the preset or file that they are to train")
    devices = find_devices()
    facts = machine(devices)
    speed = speed_of(devices[0])
    if sources or overrides:
        found = fit(list(sources), overrides, devices[0], speed)
        whole = not found["broken_rules"] and not any(one["missing"] for one in found["needs"])
        with ProgressReport(sys.stderr).showing(Waiting(PREPARING), drawn=not as_json):
            found["text_lacks"] = lacking(resolve(list(sources), overrides).config) if whole else None
        found["in_the_way"] = in_the_way(found)
        facts["configuration"] = found
        if processes is not None:
            config = resolve(list(sources), overrides).config
            # Without a GPU here it is about others.
            here = {"memory": devices[0].memory} if devices[0].kind == "cuda" and devices[0].memory else {}
            facts["configuration"]["several"] = processes_facts(config, model_shape(config), processes, **here)
    else:
        facts["presets"] = {name: preset_facts(name, devices[0], speed) for name in presets()}
    return json.dumps(facts, indent=2, ensure_ascii=False) if as_json else render(facts)


def find_devices() -> list[Device]:
    """GPUs first, then the CPU."""
    cpu = Device(f"CPU, {os.cpu_count()} cores", "cpu", _ram(), ["float32", "float64", "bfloat16"])
    if importlib.util.find_spec("torch") is None:
        return [cpu]
    import torch

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        precisions = ["float32", "float64"] + (["bfloat16"] if properties.major >= 8 else [])
        gpus.append(Device(f"cuda:{index} {properties.name}", "cuda", properties.total_memory, precisions))
    return [*gpus, cpu]


def _ram() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return None


def _free() -> int:
    """Bytes that are free where runs are written unless told otherwise."""
    return shutil.disk_usage(Path.cwd()).free


def machine(devices: Sequence[Device]) -> dict[str, Any]:
    """Everything that does not depend on a configuration."""
    place = Path.cwd()
    return {
        "tfive": __version__,
        "python": {"version": platform.python_version(), "ok": sys.version_info >= (3, 11)},
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in CORE},
        "optional": {name: {"version": _version(name), "for": use} for name, use in OPTIONAL.items()},
        "devices": [asdict(device) for device in devices],
        "disk": {"folder": str(place), "free": _free()},
    }


def model_shape(config: Config) -> ModelShape:
    """The shape of the configured model, without loading it."""
    embedded = Path(str(files("tfive").joinpath("data", config.model.name)))
    shape = find_shape(config.model.name, (embedded,))
    if shape is None:
        raise UserError(
            f"model.name = {config.model.name}: its shape is unknown here; give a folder with config.json, "
            "or a model that is named in the presets"
        )
    return shape


def speed_of(device: Device) -> float:
    """What the device does in a matrix product, in floating-point operations a second."""
    import torch

    from tfive.training.duration import product_speed

    return product_speed(torch.device(device.name.split()[0] if device.kind == "cuda" else "cpu"))


def preset_facts(name: str, device: Device, speed: float) -> dict[str, Any]:
    """What a preset trains on, what of it is missing here, and how long it would take."""
    from tfive.training.duration import expected
    from tfive.training.inputs import needed

    config = resolve([name]).config
    shape = model_shape(config)
    return {
        "model": config.model.name,
        "text": [source.path or source.hub for source in config.text.sources],
        "missing": [one.shown() for one in needed(config) if not one.there],
        "seconds": expected(config, shape, device.kind, speed).seconds,
        "fits": _fits(_table(config, shape, device), device),
    }


def fit(sources: list[str], overrides: Sequence[str], device: Device, speed: float) -> dict[str, Any]:
    """Memory per role of a configuration, whether it fits on `device`, what it needs and how long it takes."""
    from tfive.training.duration import expected
    from tfive.training.inputs import needed

    config = resolve(sources, overrides).config
    shape = model_shape(config)
    table = _table(config, shape, device)
    host = checkpoint_bytes(table, config, shape) if device.kind == "cuda" else None
    disk = room(config, table, shape, on_gpu=device.kind == "cuda")
    return {
        "sources": sources,
        "method": config.method,
        "broken_rules": [*problems(config), *_unreadable(config, shape)],
        "model": {"name": config.model.name, "parameters": shape.parameters, "shape_from": shape.source},
        "roles": [{"role": row.role, "bytes": row.bytes, "how": row.how} for row in table.rows],
        "lasting": table.lasting,
        "transient": table.transient,
        "total": table.total,
        "checkpoint_host_bytes": host,
        "disk": asdict(disk)
        | {"needed": disk.needed, "free": _free(), "shown": disk.shown(), "smaller": disk.smaller()},
        "device": device.name,
        "memory": device.memory,
        "fits": _fits(table, device),
        "smaller": [*smaller_weights(config), *smaller_passes(config)],
        "larger": _larger(config, shape, device),
        "at_most": _at_most(config, shape, device),
        "needs": [asdict(one) | {"shown": one.shown()} for one in needed(config, contents=True)],
        "duration": asdict(expected(config, shape, device.kind, speed)),
    }


def in_the_way(fit: dict[str, Any]) -> list[str]:
    """What keeps a run of this configuration from beginning on this machine."""
    missing = sum(bool(one["missing"]) for one in fit["needs"])
    return [
        *(["a broken rule"] if fit["broken_rules"] else []),
        *([f"{missing} missing {'thing' if missing == 1 else 'things'}"] if missing else []),
        *(["too little or unreadable text"] if fit["text_lacks"] else []),
        *(["too little memory"] if fit["fits"] is False else []),
        *(["too little room on disk"] if fit["disk"]["needed"] > fit["disk"]["free"] else []),
    ]


def _unreadable(config: Config, shape: ModelShape) -> list[str]:
    """What the model's kind of layers cannot do."""
    from tfive.tree.gated import recurrent_refusal

    refused = config.thought.reading == "gated" and shape.linear_layers > 0
    return [recurrent_refusal(config.model.name)] if refused else []


def _table(config: Config, shape: ModelShape, device: Device) -> Estimate:
    """Bytes on the device; on a CPU with the copy that a checkpoint is written from."""
    if device.kind == "cuda":
        return estimate(config, shape, on_gpu=True)
    return with_save(estimate(config, shape, on_gpu=False), config, shape)


def _larger(config: Config, shape: ModelShape, device: Device) -> str | None:
    """Sizes of passes that would be faster and fit a GPU as well."""
    found = larger_passes(config, shape, device.memory) if device.kind == "cuda" and device.memory else None
    return None if found is None else found.shown()


def _at_most(config: Config, shape: ModelShape, device: Device) -> str | None:
    """Why less may be needed than the table says: passes that leave padding out (`tree.packed`) are reckoned with it,
    since nobody knows before a run how long its thoughts will be."""
    from tfive.tree.packed import LARGE

    early = config.spec.thinks and config.thought.variable_length and not shape.linear_layers
    nodes = nodes_of(config)
    large = device.kind != "cuda" or nodes.texts * nodes.policy >= LARGE
    if not early or not large or config.engine.activation_checkpointing:
        return None
    return "an upper bound: passes are reckoned as if no thought closed early, and leave out the padding behind one"


def _fits(table: Estimate, device: Device) -> bool | None:
    return None if device.memory is None else table.total <= device.memory


def render(facts: dict[str, Any]) -> str:
    """The report for a person."""
    python = facts["python"]
    too_old = "" if python["ok"] else " (3.11 or newer is needed)"
    lines = [
        f"tfive {facts['tfive']}, Python {python['version']}{too_old}, {facts['system']}",
        "packages   " + ", ".join(f"{name} {version or 'MISSING'}" for name, version in facts["packages"].items()),
    ]
    for name, entry in facts["optional"].items():
        hint = f"not installed: {install_hint(EXTRAS.get(name, name))}"
        lines.append(
            f"  {'yes' if entry['version'] else 'no ':<4}{name:<12} {entry['version'] or hint} ({entry['for']})"
        )
    for device in facts["devices"]:
        memory = readable_bytes(device["memory"]) if device["memory"] else "unknown"
        lines.append(f"device     {device['name']}, {memory}; {', '.join(device['precisions'])}")
    lines.append(f"disk       {readable_bytes(facts['disk']['free'])} free in {facts['disk']['folder']}")
    if "configuration" in facts:
        lines += ["", *render_fit(facts["configuration"])]
    if "presets" in facts:
        lines += ["", *render_presets(facts["presets"], facts["devices"][0]["name"])]
    return "\n".join(lines)


def render_presets(found: dict[str, Any], device: str) -> list[str]:
    """A line a preset: its model, its text, how long it takes here; below it what is missing."""
    from tfive.training.duration import readable

    width = max(len(name) for name in found)
    lines = [f"presets    what they train on, and how long on {device} (a rough count; tfive doctor NAME says more)"]
    for name, one in found.items():
        room = {True: "", False: ", does not fit into memory", None: ""}[one["fits"]]
        took = f"about {readable(one['seconds'])}{room}"
        lines.append(f"  {name:<{width}}  {one['model']}; {', '.join(one['text'])}; {took}")
        lines += [f"  {'':<{width}}  missing: {line}" for line in one["missing"][:1]]
        if len(one["missing"]) > 1:
            lines.append(f"  {'':<{width}}  and {len(one['missing']) - 1} more: tfive doctor {name}")
    return lines


def render_fit(fit: dict[str, Any]) -> list[str]:
    """The memory table, what the run needs and how long it takes."""
    from tfive.training.duration import Duration

    model = fit["model"]
    width = 2 + max(len(row["role"]) for row in fit["roles"])
    lines = [
        f"{' '.join(fit['sources']) or 'nano'}: method {fit['method']}, {model['name']}, "
        f"{model['parameters']:,} parameters (from {model['shape_from']})",
        f"{'part':<{width}}" + "".join(f"{column:>14}" for column in COLUMNS),
    ]
    for row in fit["roles"]:
        lines.append(f"{row['role']:<{width}}" + "".join(f"{readable_bytes(row['bytes'][c]):>14}" for c in COLUMNS))
    lasting, transient, total = (readable_bytes(fit[key]) for key in ("lasting", "transient", "total"))
    verdict = {True: "fits", False: "does not fit", None: "cannot be judged"}[fit["fits"]]
    memory = readable_bytes(fit["memory"]) if fit["memory"] else "unknown memory"
    lines.append(f"total: {lasting} that last + {transient} of the largest pass = {total} (how: --json)")
    lines += [fit["at_most"]] if fit["at_most"] else []
    if fit["checkpoint_host_bytes"] is not None:
        lines.append(
            f"while a checkpoint is written: {readable_bytes(fit['checkpoint_host_bytes'])} of host memory for a copy"
        )
    remedy = f"; {' or '.join(fit['smaller'])}" if fit["fits"] is False else ""
    lines.append(f"{verdict} on {fit['device']} with {memory}, all roles on one device{remedy}")
    lines += [fit["larger"]] if fit["larger"] else []
    disk = fit["disk"]
    short = f"; {readable_bytes(disk['free'])} are free here: {disk['smaller']}"
    lines.append(f"takes {disk['shown']}{short if disk['needed'] > disk['free'] else ''}")
    lines.append("needs:")
    lines += [f"  {'no ' if one['missing'] else 'yes'}  {one['shown']}" for one in fit["needs"]]
    lacks = fit.get("text_lacks")
    if lacks is not None:
        shown = lacks or "enough for every role of a window"
        lines.append(f"  {'no ' if lacks else 'yes'}  text, prepared: {shown}")
    lines.append(f"takes {Duration(**fit['duration']).shown()}")
    lines += fit.get("several", {}).get("shown", [])
    lines += [f"rule broken: {problem}" for problem in fit["broken_rules"]]
    if "several" not in fit and (why := fit.get("in_the_way")) is not None:
        lines.append(f"not ready to train here: {', '.join(why)} (above)" if why else "ready to train here")
    return lines
