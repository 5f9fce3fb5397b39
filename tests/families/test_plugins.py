"""Families of installed packages: scaffolded, found by their entry point, refused when broken."""

from __future__ import annotations

import random
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nestling.core.errors import ConfigError
from nestling.families import plugins, public_files
from nestling.families.contract import play_problems, shape_problems, toolset_problems
from nestling.families.demonstrations import demonstrate
from nestling.families.registry import ALL, get, names
from nestling.families.scaffold import new_family_files, write_new_family
from nestling.families.splits import EvalSecret, dev_items, hidden_items
from nestling.families.vocabulary import strings

pytestmark = pytest.mark.long

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Scaffold a family and put it on the path as an installed package, with some texts changed."""
    modules: set[str] = set()

    def installed(name: str, *, entry: str = "", dist: str = "", **changes: str) -> Path:
        folder = tmp_path / f"{name}{len(modules)}"
        write_new_family(name, folder)
        for old, new in changes.items():
            path = folder / f"{name}_family/family.py"
            text = path.read_text()
            assert old in text
            path.write_text(text.replace(old, new, 1))
        info = folder / f"{dist or name}_family-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {dist or name}-family\nVersion: 0.1.0\n"
        )
        (info / "entry_points.txt").write_text(
            f"[{plugins.GROUP}]\n{entry or name} = {name}_family.family:FAMILY\n"
        )
        monkeypatch.syspath_prepend(folder)
        modules.add(f"{name}_family")
        return folder

    plugins.load.cache_clear()
    yield installed
    plugins.load.cache_clear()
    for loaded in [one for one in sys.modules if one.split(".")[0] in modules]:
        del sys.modules[loaded]


def test_an_installed_family_is_one_like_ours(install: Install) -> None:
    install("coins")
    assert names() == (*ALL, "coins")
    assert "coins_family" not in sys.modules, "listed, not imported"
    family = get("coins")
    assert shape_problems(family, "coins") == []
    assert play_problems(family) == []
    assert toolset_problems(family) == []
    files = public_files("coins")
    assert {"coins.py", "coins_tools.py", "item.py", "steps.py"} < files.keys()
    assert not [path for path, data in files.items() if b"nestling" in data or b"corrupt" in data]
    assert not any("plus" in text for text in strings()), "the shipped models' words are fixed"


def test_its_hidden_items_are_apart_and_its_demonstrations_are_right(install: Install) -> None:
    install("coins")
    secret = EvalSecret(bytes(32))
    dev = {item.prompt for item in dev_items("coins", 64)}
    hidden = {split: hidden_items("coins", split, 100, secret) for split in ("a", "b", "c")}
    sets = [dev, *({item.prompt for item in items} for items in hidden.values())]
    assert sum(map(len, sets)) == len(set.union(*sets)), "a prompt belongs to one set"
    family, item = get("coins"), hidden["b"][0]
    assert family.grade(item, demonstrate(family, item, random.Random(0))[-1].turn) == 1.0


def test_a_plug_in_never_replaces_one_of_ours(install: Install) -> None:
    install("coins", entry="ledger")
    assert names() == ALL
    assert get("ledger").public_package == "nestling.families.public"


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"FAMILY = Coins()": "FAMILY = Coins"}, "is a class; expected an instance"),
        ({"FAMILY = Coins()": "FAMILY = None"}, "its name is None"),
        ({'name = "coins"': 'name = "coin"'}, "its name is 'coin'"),
        ({"eval_range = (2, 5)": "eval_range = (2, 9)"}, r"eval_range is \(2, 9\); expected .* <= 7"),
        ({"held_out = False": "held_out = 'no'"}, "held_out is 'no', not a bool"),
        ({"    held_out = False\n": ""}, "held_out is None"),
        ({"def guess(": "def guessed("}, "it has no method guess"),
        ({"rules = rules": "rules = random", "(rules.SYSTEM_PROMPT, *call_pieces(rules))": "()"}, "its rules random lack HIGHEST"),
        ({"import random": "import no_such_module"}, "ModuleNotFoundError: No module named 'no_such"),
        ({"held_out = False": "held_out = False\n    modules = ('item',)"}, "name of a shared one"),
        ({"held_out = False": "held_out = False\n    modules = ('more',)"}, "there is no module"),
    ],
)  # fmt: skip
def test_a_broken_plug_in_says_what_is_wrong(
    install: Install, changes: dict[str, str], wrong: str
) -> None:
    install("coins", **changes)
    with pytest.raises(ConfigError, match=wrong) as caught:
        get("coins")
    assert "coins-family 0.1.0" in str(caught.value)
    assert get("ledger").name == "ledger", "ours still work"


def test_two_packages_with_one_name_are_told_apart(install: Install) -> None:
    install("coins")
    install("coins", dist="other")
    with pytest.raises(ConfigError, match=r"declared by .*other-family 0.1.0.*; expected one"):
        get("coins")


def test_an_unknown_family_gets_the_nearest_name(install: Install) -> None:
    install("coins")
    with pytest.raises(ConfigError, match="did you mean 'coins'"):
        get("coin")


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"return str(total)": "return str(total + 1)"}, "solve gives"),
        ({'"plus": total}': '"plus": 0}'}, "solve gives"),
        ({"return str(rng.randint(1, 20 * len(item.world[\"order\"])))": "return 'a b'"}, "guess"),
        ({"return name, {**arguments, \"plus\": arguments[\"plus\"] + 1}": "return name"}, "Error"),
    ],
)  # fmt: skip
def test_the_check_finds_what_playing_shows(
    install: Install, changes: dict[str, str], wrong: str
) -> None:
    install("coins", **changes)
    problems = play_problems(get("coins"))
    assert problems
    assert wrong in problems[0]


def test_the_check_compares_the_toolset(install: Install) -> None:
    folder = install("coins")
    path = folder / "coins_family/public/coins_tools.py"
    text = path.read_text().replace("who: StrictStr, plus", "whom: StrictStr, plus")
    path.write_text(text.replace("counted: list[str]", "asked: list[str]"))
    problems = toolset_problems(get("coins"))
    assert any("no field 'counted'" in one for one in problems)
    assert any("has no count(who, plus)" in one for one in problems)


def test_too_few_prompts_are_noticed(install: Install) -> None:
    folder = install("coins")
    path = folder / "coins_family/public/coins.py"
    path.write_text(path.read_text().replace("HIGHEST = 7", "HIGHEST = 1"))
    family = folder / "coins_family/family.py"
    family.write_text(family.read_text().replace("eval_range = (2, 5)", "eval_range = (1, 1)"))
    assert any("different prompts; expected" in one for one in play_problems(get("coins")))


@pytest.mark.parametrize("name", ALL)
def test_ours_keep_the_contract_too(name: str) -> None:
    family = get(name)
    assert shape_problems(family, name) == []
    assert play_problems(family, 10) == []
    assert toolset_problems(family) == []


@pytest.mark.parametrize("name", ["Coins", "2coins", "a-b", "a__b", "", "class", "item", "ledger"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="choose another name"):
        new_family_files(name)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        write_new_family("coins", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_scaffold_is_installed_by_pip_tested_and_probed(tmp_path: Path) -> None:
    folder, venv = tmp_path / "new", tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin/python"
    site = next((venv / "lib").glob("python*/site-packages"))
    ours = sysconfig.get_path("purelib")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")

    def run(*command: str) -> str:
        done = subprocess.run(
            [python, "-m", *command], cwd=tmp_path, capture_output=True, text=True, timeout=900,
            env={"PATH": "/usr/bin:/bin", "NESTLING_STATE": str(tmp_path), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("nestling", "families", "new", "big_coins", "--out", str(folder))
    run("pip", "install", "-q", "--no-deps", "--no-build-isolation", str(folder))
    assert "plug-in" in run("nestling", "families", "list")
    assert "keeps the contract" in run("nestling", "families", "check", "big_coins")
    assert "3 passed" in run("pytest", "-p", "no:randomly", str(folder / "tests"))
    played = run("nestling", "episode", "--policy", "noop", "--family", "big_coins", "--json")
    assert '"outcome"' in played
    small = {
        "families.training": '["big_coins"]', "outer.steps": 1, "outer.group_size": 2,
        "outer.held_out.every_steps": 0, "inner.eval_items": 8, "fleet.workers": 2,
    }  # fmt: skip
    settings = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    run("nestling", "init", "mine")
    run("nestling", "run", "mine/recipe.toml", "--out", "run", *settings)
    assert "big_coins" in (tmp_path / "run/report/episodes.csv").read_text()
