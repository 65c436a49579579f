"""The plan of the house, held by reading the source: arrows run downwards, names stay few, files stay short."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tfive

SOURCE = Path(tfive.__file__).parent
ROOT = {"errors", "section", "chance", "telemetry"}
"""Root modules that every room may import."""

CONFIGURATION = {"config", "rules", "layers"}
"""Root modules that assemble the rooms' settings; they stand beside run."""

BELOW: dict[str, set[str]] = {
    "tree": set(),
    "text": {"tree"},
    "models": {"tree"},
    "learn": {"tree"},
    "protocol": {"text", "models", "learn", "tree"},
    "rollout": {"text", "models", "learn", "tree"},
    "credit": {"text", "models", "learn", "tree"},
    "theory": {"credit", "learn"},
    "report": set(),
}
BELOW["parts"] = {"protocol", "rollout", "credit", "text", "models", "learn", "tree"}
BELOW["methods"] = BELOW["parts"] | {"parts"}
BELOW["evaluate"] = set(BELOW["methods"])
BELOW["run"] = BELOW["methods"] | {"methods", "evaluate", "theory", "report"} | CONFIGURATION
BELOW["cli"] = BELOW["run"] | {"run"}
BELOW |= {name: set() for name in (*ROOT, "layers")}
BELOW["config"] = {"layers", "rules"}
BELOW["rules"] = {"config"}

PEERS = {"protocol": {"rollout", "credit"}, "rollout": {"protocol", "credit"}, "credit": {"rollout", "protocol"}}
"""Rooms on one floor: they may look across, never in a circle (checked below)."""

PURE = {"credit": {"torch", "numpy"}, "learn": {"torch", "numpy"}}
"""Rooms of pure mathematics: the third-party packages they may import."""

SILENT = set(BELOW) - {"cli", "run", "config", "rules", "layers"}
"""Parts that neither print, log nor read the clock."""

MAX_LINES = 400


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    inside = path.relative_to(SOURCE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Dotted names of everything a module imports, also inside functions."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms_used(path: Path) -> set[str]:
    """Rooms and root modules of ours that a module imports."""
    named = {name.split(".")[1] for name in imports_of(path) if name.startswith("tfive.")}
    return named - {room_of(path), "__version__"}


def is_settings(path: Path) -> bool:
    return path.name == "settings.py"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_arrows_run_downwards(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    assert room in BELOW, f"{path}: a part the plan does not know; add it to DESIGN and to this test"
    allowed = ROOT | BELOW[room] | PEERS.get(room, set())
    used = rooms_used(path)
    if path == SOURCE / "config.py":
        settings = {name for name in imports_of(path) if name.startswith("tfive.") and ".settings." in name}
        used -= {name.split(".")[1] for name in settings}
    if path == SOURCE / "rules.py":
        used -= {"protocol"}
    assert used <= allowed, f"{path}: imports {sorted(used - allowed)}, which lies above or beside it"


def test_peers_do_not_import_in_a_circle() -> None:
    graph = {
        (room_of(path), path.stem): {
            (parts[1], parts[2])
            for name in imports_of(path)
            if (parts := name.split("."))[0] == "tfive" and len(parts) > 2 and parts[1] in PEERS
        }
        for path in modules()
        if room_of(path) in PEERS
    }
    done: set[tuple[str, str]] = set()

    def walk(node: tuple[str, str], trail: tuple[tuple[str, str], ...]) -> None:
        assert node not in trail, f"circle: {' → '.join('.'.join(part) for part in (*trail, node))}"
        if node not in done:
            for further in graph.get(node, ()):
                walk(further, (*trail, node))
            done.add(node)

    for start in graph:
        walk(start, ())


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_mathematics_is_pure_and_lower_rooms_are_silent(path: Path) -> None:
    room = room_of(path)
    packages = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names) - {"tfive"}
    if room in PURE and not is_settings(path):
        assert packages <= PURE[room], f"{path}: {sorted(packages - PURE[room])} has no place in pure mathematics"
        assert not {"settings"} & {
            name.split(".")[2] for name in imports_of(path) if name.startswith("tfive.") and name.count(".") > 1
        }
    if room in SILENT:
        standard = {name.split(".")[0] for name in imports_of(path)}
        assert not standard & {"logging", "time", "warnings"} - _allowed_warnings(path), (
            f"{path}: prints, logs or reads the clock"
        )
        called = [node.func for node in nodes_of(path) if isinstance(node, ast.Call)]
        calls = {function.id for function in called if isinstance(function, ast.Name)}
        assert "print" not in calls, f"{path}: prints"


def _allowed_warnings(path: Path) -> set[str]:
    # Catching a library's warnings is not speaking; only `warnings.warn` would be.
    source = path.read_text("utf-8")
    return {"warnings"} if "warnings.warn" not in source else set()


@pytest.mark.parametrize("path", [p for p in modules() if is_settings(p)], ids=lambda path: path.parent.name)
def test_settings_import_nothing_heavy(path: Path) -> None:
    packages = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names)
    assert packages <= {"tfive", "pydantic"}
    assert rooms_used(path) <= {"section", "errors"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_stay_short_and_well_named(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MAX_LINES
    assert path.stem not in {"utils", "util", "helpers", "helper", "misc", "common"}


@pytest.mark.parametrize("room", sorted(p.parent.name for p in SOURCE.glob("*/__init__.py")))
def test_rooms_have_empty_fronts(room: str) -> None:
    assert (SOURCE / room / "__init__.py").read_text("utf-8") == ""


def test_at_most_ten_public_names_and_each_is_there() -> None:
    assert len(tfive.__all__) <= 10
    assert sorted(tfive.__all__) == list(tfive.__all__)
    for name in tfive.__all__:
        assert getattr(tfive, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = tfive.trian
    assert importlib.import_module("tfive") is tfive


HEAVY = ("torch", "transformers", "numpy", "rich.progress", "matplotlib")


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import tfive", (*HEAVY, "pydantic")),
        ("import tfive.cli", HEAVY),
        ("from tfive.run.show import show_config; show_config([], [], True, False)", ("torch", "transformers")),
    ],
)
def test_what_is_asked_often_imports_little(code: str, forbidden: tuple[str, ...]) -> None:
    script = f"import sys; {code}; print([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def installed_below(name: str, extras: set[str], seen: dict[str, set[str]]) -> None:
    """Every distribution that `name[extras]` brings along, by canonical name."""
    key = canonicalize_name(name)
    fresh = (extras | {""}) - seen.setdefault(key, set())
    seen[key] |= fresh
    for text in importlib.metadata.requires(name) or [] if fresh else []:
        wanted = Requirement(text)
        if any(wanted.marker is None or wanted.marker.evaluate({"extra": extra}) for extra in fresh):
            installed_below(wanted.name, set(wanted.extras), seen)


def test_constraints_pin_everything_the_tests_install() -> None:
    lines = (SOURCE.parents[1] / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins)
    pinned = {canonicalize_name(name) for name, _ in pins}
    seen: dict[str, set[str]] = {}
    installed_below("tfive", {"test"}, seen)
    assert set(seen) - {"tfive"} <= pinned
