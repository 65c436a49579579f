"""Methods of other packages: what is refused when one is registered, and what happens without one that a file names."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfive
from tfive.config.config import Config, resolve
from tfive.errors import UserError
from tfive.methods import MethodSpec, methods, register, registry
from tfive.methods.method import Kit
from tfive.section import Section


class OwnSettings(Section):
    """`own`: settings of a method that only these tests know."""

    scale: float = 1.0
    """Factor on every advantage."""


class Incomplete(Section):
    """A section that cannot stand in a configuration without being set."""

    needed: int
    """Has no default."""


def spec(name: str = "own", settings: type[Section] | None = OwnSettings, section: str = "own") -> MethodSpec:
    return MethodSpec(name=name, summary="of these tests", method="nowhere:Own", settings=settings, section=section)


@pytest.fixture
def own() -> Iterator[Config]:
    """A configuration that is older than the method `own`, which is gone again after the test."""
    older = Config()
    register(spec())
    yield older
    del registry._REGISTRY["own"], Config.__pydantic_fields__["own"], Config.__annotations__["own"]
    Config.model_rebuild(force=True)


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (spec(section="critic"), "method own: section critic is taken by the configuration"),
        (spec(section="group"), "method own: section group is taken by the configuration"),
        (spec(section="to_toml"), "method own: section to_toml is taken by the configuration"),
        (spec(section="ppo"), "method own: section ppo is already that of quiet-star-ppo"),
        (spec(section="own.inner"), "method own: section 'own.inner': use small letters"),
        (spec(name="own+more"), "method 'own.more': use letters"),
        (spec(settings=Incomplete), "method own: own.needed has no default"),
        (spec(settings=dict), "are no tfive.section.Section"),  # type: ignore[arg-type]
    ],
    ids=["section", "property", "function", "other method", "dotted", "name", "no default", "no section"],
)
def test_what_cannot_work_is_refused_and_leaves_nothing_behind(refused: MethodSpec, said: str) -> None:
    before, fields = methods(), set(Config.model_fields)
    with pytest.raises(UserError, match=said):
        register(refused)
    assert methods() == before
    assert set(Config.model_fields) == fields
    assert Config().group == 1


def test_registering_the_same_method_again_changes_nothing(own: Config) -> None:
    before = Config()
    register(spec())
    assert Config() == before


def test_a_configuration_made_before_a_method_has_its_defaults(own: Config) -> None:
    assert own.leaves() == Config().leaves()
    assert own.to_toml() == Config().to_toml()
    switched = own.model_copy(update={"method": "own"})
    assert Kit(switched, {}, None).settings == OwnSettings()
    with pytest.raises(ValueError, match="method t5 declares no settings"):
        _ = Kit(own, {}, None).settings


def test_an_outside_section_survives_files_copies_and_pickles(own: Config, tmp_path: Path) -> None:
    config = resolve(["nano"], ["method=own", "own.scale=2.5"]).config
    file = tmp_path / "own.toml"
    file.write_text(config.to_toml(), "utf-8")
    for same in (resolve([file]).config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config
        assert Kit(same, {}, None).settings.scale == 2.5


def test_a_role_that_no_window_has_is_named() -> None:
    wrong = MethodSpec(name="roles-of-its-own", summary="of these tests", method="nowhere:Own", roles=("actr",))
    register(wrong)
    try:
        with pytest.raises(UserError, match="method = roles-of-its-own: it declares the role actr"):
            Config.load("nano", overrides=["method=roles-of-its-own"])
    finally:
        del registry._REGISTRY["roles-of-its-own"]


def test_a_file_of_a_method_that_is_not_installed_names_the_method(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('method = "far-away"\n\n[far_away]\nscale = 1.0\n', "utf-8")
    with pytest.raises(UserError, match=r"^method = far-away \(.*config.toml\): no such method here; install the"):
        resolve(["nano", file])
    file.write_text('method = "t5"\n\n[far_away]\nscale = 1.0\n', "utf-8")
    with pytest.raises(UserError, match=r"^far_away.scale \(.*config.toml:4\): no such key"):
        resolve(["nano", file])


def installed(folder: Path, module: str, text: str) -> subprocess.CompletedProcess[str]:
    """`tfive config methods` beside an installed package of one module with an entry point."""
    (folder / f"{module}.py").write_text(text, "utf-8")
    facts = folder / f"{module}-0.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n", "utf-8")
    (facts / "entry_points.txt").write_text(f"[tfive.methods]\n{module} = {module}:SPEC\n", "utf-8")
    places = os.pathsep.join([str(folder), str(Path(tfive.__file__).parents[1])])
    command = [sys.executable, "-m", "tfive", "config", "methods"]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True, check=False
    )


def test_a_module_may_register_its_method_and_be_an_entry_point(tmp_path: Path) -> None:
    text = "from tfive.methods import MethodSpec, register\nSPEC = register(MethodSpec(name='both', summary='s', "
    done = installed(tmp_path, "both", text + "method='both:Both'))\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("both ") == 1


def test_an_entry_point_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    done = installed(tmp_path, "broken", "import nothing_of_this_name\n")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "entry point broken = broken:SPEC of broken: No module named 'nothing_of_this_name'" in done.stderr
