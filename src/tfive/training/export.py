"""Export of a run's newest checkpoint: the actor as a Hugging Face folder; delimiters and gates for `ThoughtModel`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfive.errors import UserError
from tfive.inference.thought_model import ThoughtModel
from tfive.models.load import Loaded, load_model
from tfive.models.precision import COMPUTE
from tfive.models.weights import model_digests
from tfive.report.card import CARD, model_card
from tfive.rl.gate import PredictionGate
from tfive.training import continuity
from tfive.training.adapter_files import require_adapter, save_adapter, with_updates
from tfive.training.checkpoint import CheckpointStore
from tfive.training.push import check_repo, push
from tfive.training.run_folder import CHECKPOINTS, read_config
from tfive.training.summary import SUMMARY
from tfive.tree.forward import Delimiters
from tfive.tree.gated import ReadingGates
from tfive.tree.low_rank import merge

LOSSY = 0.1
"""Part of the low-rank updates' size that may be lost in merged weights without a word."""


def export(
    run_folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    exact: bool = False,
    untrained: bool = False,
    skip_damaged: bool = False,
    adapter: bool = False,
    model: Loaded | None = None,
    repo: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Write the actor, delimiters and gates of a finished or stopped run to `out`, with a model card; returns a record
    of what it wrote.

    Weights are the compute copy that sampled and was measured; with `exact` the float32 masters behind it, where the
    run kept any. Low-rank updates (`actor.adapt = lora`) are put into the base model's weights, in the precision they
    were trained on or (`exact`) float32; with `adapter` they are written alone, for peft. A run whose actor never moved
    is refused unless `untrained` asks for it, and a damaged newest checkpoint unless `skip_damaged` asks for the one
    before it. `model` is the base model of a run started with the caller's own; its weights are replaced. `repo` is
    where the card says it can be found.
    `trust_remote_code` lets a model bring code of its own; it is never read from a file.
    """
    folder, target = Path(run_folder), Path(out)
    config = read_config(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} already exists and is not empty; choose another folder")
    if adapter:
        require_adapter(config)
    checkpoint, tree, damaged = _newest(folder, skip_damaged)
    state = tree["method"]
    continuity.check(tree.get("began"), config, None, None, folder)
    try:
        weights, gate, delimiters = _learned(state, exact)
        dtype = next(iter(weights.values())).dtype
        if config.actor.adapt == "lora" and not exact:
            dtype = {**COMPUTE, "float64": torch.float64}[state["actor"]["compute"]]
        opened: dict[str, Tensor] | None = state["actor"].get("reading_gates")
        progress = {name: state[name] for name in ("window", "phase")}
        updates = 0 if gate is None else int(state["gate"]["optimizer"]["steps"])
        actor_updates = int(state["actor"]["optimizer"]["steps"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, StopIteration) as error:
        reason = " ".join(f"{error!r}".split())[:200]
        raise UserError(f"{folder}: {checkpoint} holds no actor ({reason}); use the tfive that trained it") from error
    if actor_updates == 0 and not untrained:
        raise UserError(
            f"{folder}: its actor was never updated, so this is {config.model.name} as it came; train it, or export it "
            "as it is with --untrained"
        )
    loaded = model or load_model(
        config.model.name,
        device="cpu",
        dtype=dtype,
        revision=config.model.revision,
        trust_remote_code=trust_remote_code,
    )
    if model is None:
        digests = model_digests(config.model.name, config.model.revision)
        continuity.check(tree["began"], config, digests, None, folder)
    lost = 0.0
    try:
        if config.actor.adapt == "lora":
            with_updates(loaded.model, config, weights)
            lost = 0.0 if adapter else merge(loaded.model)
        else:
            loaded.model.load_state_dict(weights)
        gates = None if opened is None else ReadingGates.of(loaded.model)
        if gates is not None and opened is not None:
            gates.load_state_dict(opened)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder}: its weights do not fit {loaded.name} ({reason}); use the run's own model"
        ) from error
    record = {"base": loaded.name, "method": config.method, "seed": config.run.seed, **progress}
    record |= {
        "checkpoint": checkpoint,
        "actor_updates": actor_updates,
        "gate_updates": updates,
        "finished": (Path(folder) / SUMMARY).is_file(),
    }
    if adapter:
        described = {**record, "gate": False, "adapter": True}
        save_adapter(loaded.model, config, target, model_card(folder, described, repo))
        return {**described, "out": str(target), "damaged": damaged}
    thinker = ThoughtModel(
        loaded.model, loaded.tokenizer, config.thought, config.sampling, gate, delimiters, gates=gates, origin=record
    )
    card = model_card(folder, {**record, "gate": gate is not None}, repo)
    thinker.save_pretrained(target)
    (target / CARD).write_text(card, "utf-8")
    lossy = {"update_lost": round(lost, 4)} if config.actor.adapt == "lora" else {}
    return {**record, "gate": gate is not None, "out": str(target), "damaged": damaged, **lossy}


def _newest(folder: Path, skip_damaged: bool) -> tuple[str, dict[str, Any], list[str]]:
    """Name and tree of the newest checkpoint, and a line for every newer one that was skipped."""
    if not (store := CheckpointStore(folder / CHECKPOINTS)).paths():
        raise UserError(f"{folder}: no usable checkpoint (there is none yet); go on with tfive resume {folder}")
    checkpoint, skipped = store.usable(skip_damaged=skip_damaged)
    tree = checkpoint.tree
    if not isinstance(tree, dict) or not isinstance(tree.get("method"), dict):
        raise UserError(f"{folder}: {checkpoint.path.name} is no checkpoint of a training run")
    return checkpoint.path.name, tree, skipped


def _learned(state: dict[str, Any], exact: bool) -> tuple[dict[str, Tensor], PredictionGate | None, Delimiters | None]:
    """Actor weights, gate and learned delimiters of a method's state."""
    actor = state["actor"]
    weights: dict[str, Tensor] = dict(actor["model"])
    if exact:
        # A master stands for every name its parameter goes by: tied weights have several.
        entries = actor["optimizer"]["parameters"].items()
        masters = {id(weights[name]): entry["master"] for name, entry in entries if "master" in entry}
        weights = {name: masters.get(id(tensor), tensor) for name, tensor in weights.items()}
    delimiters = Delimiters(actor["delimiters"]["weight_2D"]) if "delimiters" in actor else None
    return weights, None if state["gate"] is None else _gate(state["gate"]["gate"]), delimiters


def _gate(weights: dict[str, Tensor]) -> PredictionGate:
    width, features = weights["project.weight"].shape
    gate = PredictionGate(features, width=width)
    gate.load_state_dict(weights)
    return gate


def export_command(
    folder: str,
    out: str,
    *,
    exact: bool,
    untrained: bool,
    skip_damaged: bool = False,
    adapter: bool = False,
    as_json: bool,
    trust_remote_code: bool = False,
    repo: str | None = None,
) -> str:
    """What `tfive export` does; returns what to print."""
    if repo is not None:
        check_repo(repo)
    chosen: dict[str, Any] = {"exact": exact, "untrained": untrained, "adapter": adapter}
    chosen["skip_damaged"] = skip_damaged
    record = export(folder, out, repo=repo, trust_remote_code=trust_remote_code, **chosen)
    if repo is not None:
        record["pushed"] = push(Path(out), repo)
    if as_json:
        return json.dumps(record, ensure_ascii=False)
    gate = "no gate" if not record["gate"] else f"gate after {record['gate_updates']} updates"
    actor = f"the actor of window {record['window']} ({record['checkpoint']}) after {record['actor_updates']} updates"
    lines = [*record["damaged"], f"{out}: {actor}, {gate}"]
    if not record["finished"]:
        lines.append(f"the run is not finished; for the trained model go on first: tfive resume {folder}")
    if record.get("update_lost", 0.0) > LOSSY:
        lines.append(
            f"{record['update_lost']:.0%} of the low-rank updates' size is lost to the precision of the weights they "
            "were put into; --exact keeps it in float32, --adapter beside them"
        )
    if repo is not None:
        lines.append(f"pushed to {record['pushed']}; a repository that was new is private until you change that there")
    if adapter:
        return "\n".join([*lines, f'use it on {record["base"]}: peft.PeftModel.from_pretrained(model, "{out}")'])
    lines.append(f"its model card is {Path(out) / CARD}; look at its thoughts with: tfive play {out}")
    return "\n".join(
        [*lines, f'use it: tfive.ThoughtModel.from_pretrained("{out}"), or plain transformers for the actor']
    )
