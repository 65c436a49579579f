"""A hub that cannot be found: cached models load from the cache alone, others are refused at once."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from huggingface_hub import constants

from tfive.errors import UserError
from tfive.models import hub, load

NAME = "someone/some-model"


def unknown(*_: Any, **__: Any) -> Any:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    hub._leads_somewhere.cache_clear()
    monkeypatch.setattr(hub.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_, **__: None)
    for kind in (load.AutoConfig, load.AutoTokenizer, load.AutoModelForCausalLM):
        monkeypatch.setattr(kind, "from_pretrained", lambda *given, **options: pytest.fail("the hub was asked"))


@pytest.mark.parametrize("what", [load.load_model, load.load_tokenizer])
def test_a_model_that_is_nowhere_is_refused_without_asking(what: Any) -> None:
    with pytest.raises(UserError, match=r"^someone/some-model: there is no such folder, .*; give a model") as told:
        what(NAME)
    assert "\n" not in str(told.value)


def test_a_cached_model_is_loaded_from_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_, **__: "/cache/config.json")
    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", lambda name, **options: asked.append(options))
    load.load_tokenizer(NAME)
    assert [one["local_files_only"] for one in asked] == [True]


@pytest.mark.parametrize("way", ["found", "proxy", "offline"])
def test_otherwise_the_libraries_decide(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "found":
        monkeypatch.setattr(hub.socket, "getaddrinfo", lambda *_: [])
    elif way == "proxy":
        monkeypatch.setattr(hub.urllib.request, "getproxies", lambda: {"https": "http://127.0.0.1:9"})
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.hub_options(NAME) == {}
