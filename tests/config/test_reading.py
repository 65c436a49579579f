"""Which keys a method reads, names that are close or former, and problems as JSON."""

from __future__ import annotations

import json
import tomllib

import pytest

from tfive.cli import app as cli
from tfive.cli.show_config import show_config
from tfive.config.config import Config, resolve
from tfive.config.layers import leaf_fields, nearest
from tfive.config.reading import read_keys, readers
from tfive.errors import UserError
from tfive.methods.registry import methods


def keys_of(method: str, *overrides: str) -> set[str]:
    return read_keys(Config.load("nano", overrides=[f"method={method}", *overrides]))


def test_a_method_reads_what_it_declares() -> None:
    everything = set(leaf_fields(Config))
    assert everything - keys_of("t5") == {key for key in everything if key.split(".")[0] in ("ppo", "grpo", "rlp")}
    rlp = keys_of("rlp")
    assert "rlp.decay" in rlp or any(key.startswith("rlp.") for key in rlp)
    assert not {key for key in rlp if key.startswith(("critic.", "qualify.", "calibration.", "gae.", "ppo."))}
    assert not rlp & {"window.qualify", "window.critic_fit", "window.probe", "window.history", "window.crossed"}
    assert {"window.critic_fit", "window.history", "critic.lr"} <= keys_of("quiet-star-ppo")
    assert "window.crossed" in keys_of("t5") - keys_of("quiet-star-ppo")
    assert {"window.critic_fit", "ppo.frozen_windows"} <= keys_of("quiet-star-ppo", "window.history=true")
    assert "window.head_train" not in keys_of("t5", "calibration.mode=average")
    assert not {key for key in keys_of("base") if key.startswith(("optimizer.", "actor.", "reward.", "gate."))}


def test_every_section_is_read_by_some_method() -> None:
    sections = {key.split(".")[0] for key in leaf_fields(Config)}
    assert all(readers(section) is None or readers(section) for section in sections)
    assert readers("text") is None
    assert readers("calibration") == ["t5"]


def test_the_keys_of_one_method_are_shown() -> None:
    shown = tomllib.loads(show_config(["nano"], [], False, False, "ntp"))
    assert shown["method"] == "ntp"
    assert {"critic", "reward", "gate"} & set(shown) == set()
    assert set(json.loads(show_config(["nano"], [], False, True, "rlp"))) == keys_of("rlp")
    with pytest.raises(UserError, match="must be one of"):
        show_config(["nano"], [], False, False, "absent")
    assert methods().keys() >= {"ntp", "rlp"}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("foo.bar", "no such key; tfive config show --explain lists all"),
        ("thought.lenght", "did you mean thought.length?"),
        ("windows", "did you mean window.windows?"),
        ("lr", "did you mean anchor.lr, optimizer.lr or critic.lr?"),
    ],
)
def test_only_close_keys_are_suggested(key: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve(["nano"], [f"{key}=1"])
    assert str(refused.value).endswith(said)


def test_nothing_is_near_to_nothing() -> None:
    assert nearest("quantum", ["thought.length"]) == []
    with pytest.raises(UserError, match="no such preset; name one of those"):
        resolve(["zzz"])


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-instruct"])
def test_a_former_preset_says_what_it_is_called_now(name: str) -> None:
    with pytest.raises(
        UserError, match=rf"^{name}: this preset is now smollm2-135m-(toy|study): SmolLM2-135M-Instruct on"
    ):
        resolve([name])


@pytest.mark.parametrize("override", ["gae.alpha=-1", "foo.bar=1", "thought.length=nothing"])
def test_problems_of_single_values_are_json_too(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["config", "check", "nano", "--set", override, "--json"])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    found = json.loads(printed.out)
    assert (found["ok"], len(found["problems"]), printed.err) == (False, 1, "")
    assert override.partition("=")[0] in found["problems"][0]
