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
LAB = SOURCE.parent / "tfive_lab"
ROOT = {"errors", "extras", "printable", "section", "rng", "telemetry"}
"""Root modules that every room may import."""

BELOW: dict[str, set[str]] = {
    "tree": set(),
    "models": {"tree"},
    "text": {"tree"},
    "report": set(),
    "distributed": set(),
}
"""Room → the rooms it may import."""
BELOW["rl"] = {"tree", "models", "text", "distributed"}
BELOW["inference"] = BELOW["rl"] | {"rl"}
BELOW["methods"] = BELOW["rl"] | {"rl", "config"}
BELOW["evaluate"] = BELOW["inference"] | {"inference"}
BELOW["config"] = BELOW["methods"] | {"methods", "training"}
BELOW["training"] = BELOW["evaluate"] | {"evaluate", "methods", "config", "report", "distributed"}
BELOW["cli"] = BELOW["training"] | {"training", "tfive_lab"}
BELOW["tfive_lab"] = BELOW["training"] | {"training"}
BELOW["__main__"] = {"cli"}
BELOW |= {name: set() for name in ROOT}

PURE = (
    "rl/losses.py", "rl/gae.py", "rl/reward.py", "rl/qualify.py", "rl/drift.py", "rl/clusters.py",
    "rl/calibration/early_stop.py", "rl/calibration/mean.py", "rl/calibration/mixture.py", "rl/calibration/moments.py",
    "rl/calibration/repeated.py", "rl/calibration/saddle.py", "rl/calibration/validation.py",
)  # fmt: skip
"""Pure mathematics: tensors in, tensors out; of third-party packages only torch and numpy, no settings."""

SPEAKING = {"cli", "training", "config", "__main__", "tfive_lab"}
"""Parts that may print, log or read the clock; all others are silent."""

MAX_LINES = 400


@functools.cache
def modules() -> list[Path]:
    return sorted([*SOURCE.rglob("*.py"), *LAB.rglob("*.py")])


def name_of(path: Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def shown(path: Path) -> str:
    return str(path.relative_to(SOURCE.parent))


def room_of(path: Path) -> str:
    inside = path.relative_to(SOURCE.parent).parts
    if inside[0] == LAB.name:
        return LAB.name
    return inside[1] if len(inside) > 2 else path.stem


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


@functools.cache
def files_used(path: Path) -> set[str]:
    """Modules of ours that a module imports, wherever it does: at its top, inside functions, for type checking."""
    ours = {name_of(other) for other in modules()}
    named = {name for name in imports_of(path) if name.split(".")[0] in (SOURCE.name, LAB.name)}
    found = {name if name in ours else name.rpartition(".")[0] for name in named}
    return found - {name_of(path), SOURCE.name}


def rooms_used(path: Path) -> set[str]:
    """Rooms and root modules of ours that a module imports."""
    rooms = {LAB.name if name.startswith(LAB.name) else name.split(".")[1] for name in files_used(path)}
    return rooms - {room_of(path)}


def is_settings(path: Path) -> bool:
    return path.name == "settings.py"


def test_arrows_run_downwards() -> None:
    for path in modules():
        room = room_of(path)
        if room == "__init__":
            continue
        assert room in BELOW, f"{path}: a room that is not in the plan; add it to CONTRIBUTING and to this test"
        used = rooms_used(path)
        if room == "config":
            # A configuration is made of declarations alone: every room's settings and the methods' specs.
            other = {name for name in files_used(path) if name.split(".")[1] not in ROOT | {"config"}}
            declared = {name for name in other if name.endswith(".settings")}
            assert other - declared <= {"tfive.methods.registry", "tfive.methods.spec"}, f"{path}: {sorted(other)}"
        assert used <= ROOT | BELOW[room], f"{path}: imports {sorted(used - ROOT - BELOW[room])}, above or beside it"


def test_files_do_not_import_in_a_circle() -> None:
    graph = {name_of(path): files_used(path) for path in modules()}
    done: set[str] = set()

    def walk(node: str, trail: tuple[str, ...]) -> None:
        assert node not in trail, f"circle: {' → '.join((*trail[trail.index(node) :], node))}"
        if node not in done:
            for further in sorted(graph.get(node, ())):
                walk(further, (*trail, node))
            done.add(node)

    for start in graph:
        walk(start, ())


def test_mathematics_is_pure() -> None:
    for inside in PURE:
        path = SOURCE / inside
        packages = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names) - {"tfive"}
        assert packages <= {"torch", "numpy"}, f"{path}: {sorted(packages)}: no place in pure mathematics"
        assert not [name for name in files_used(path) if name.endswith(".settings")], f"{path}: reads settings"


def test_rooms_below_training_are_silent() -> None:
    for path in modules():
        if room_of(path) in SPEAKING:
            continue
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


def test_settings_import_nothing_heavy() -> None:
    for path in filter(is_settings, modules()):
        packages = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names)
        assert packages <= {"tfive", "pydantic"}, path
        assert rooms_used(path) <= {"section", "errors"}, path


def test_files_stay_short_and_well_named() -> None:
    scripts = [
        path for folder in ("benchmarks", "studies", "recipes") for path in (SOURCE.parents[1] / folder).rglob("*.py")
    ]
    for path in [*modules(), *scripts]:
        assert len(path.read_text("utf-8").splitlines()) <= MAX_LINES, path
        assert path.stem not in {"utils", "util", "helpers", "helper", "misc", "common"}, path


def test_rooms_have_empty_fronts() -> None:
    # `tfive.methods` is where other packages register a method.
    for front in [p for p in modules() if p.name == "__init__.py" and p.parent not in (SOURCE, SOURCE / "methods")]:
        assert front.read_text("utf-8") == "", front


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
        ("import tfive.cli.app", HEAVY),
        ("from tfive.cli.show_config import show_config; show_config([], [], True, False)", ("torch", "transformers")),
    ],
)
def test_what_is_asked_often_imports_little(code: str, forbidden: tuple[str, ...]) -> None:
    script = f"import sys; {code}; print([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


TYPOS = {"nope": "no such preset", "nano --set window.itmes=4": "no such key"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        *((f"{command} {typo}", told) for command in ("train", "doctor", "data prepare", "data stats", "compare")
          for typo, told in TYPOS.items()),
        ("compare nano --methods t5,nope", "no method, variant or .toml file is called nope"),
        ("compare nano --seeds many", "give how many (3)"),
        ("resume nowhere", "no run here (config.toml is missing)"),
        ("export nowhere out", "no run here (config.toml is missing)"),
    ],
)  # fmt: skip
def test_a_typo_is_told_before_libraries_are_loaded(words: str, reason: str) -> None:
    told = f"import sys; from tfive.cli.app import _call; status = _call({words.split()!r})"
    script = f"{told}; print(status, [name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 []"
    assert reason in done.stderr


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
