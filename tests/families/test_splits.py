import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nestling.core.errors import ConfigError
from nestling.families.registry import ALL
from nestling.families.splits import HIDDEN, EvalSecret, commitment, dev_items, hidden_items

SECRET, OTHER = EvalSecret(bytes(32)), EvalSecret(bytes(range(32)))


@pytest.mark.parametrize("family", ALL)
def test_sets_share_no_prompt_and_follow_the_difficulty(family: str) -> None:
    sets = {split: hidden_items(family, split, 60, SECRET) for split in HIDDEN}
    prompts = [{item.prompt for item in items} for items in (*sets.values(), dev_items(family, 40))]
    assert sum(map(len, prompts)) == len(set.union(*prompts))
    for items in sets.values():
        assert len({item.identity for item in items}) == 60
        assert len({item.num_calls for item in items}) > 1


@pytest.mark.parametrize("family", ALL)
def test_items_are_a_prefix_and_depend_on_the_secret_alone(family: str) -> None:
    assert hidden_items(family, "b", 30, SECRET)[:10] == hidden_items(family, "b", 10, SECRET)
    ours = {item.identity for item in hidden_items(family, "b", 40, SECRET)}
    theirs = {item.identity for item in hidden_items(family, "b", 40, OTHER)}
    assert len(ours & theirs) < 4
    assert dev_items(family, 8) == dev_items(family, 20)[:8]


def test_sets_are_large_enough_for_reports() -> None:
    for family in ALL:
        assert len(hidden_items(family, "c", 400, SECRET)) == 400


def test_the_secret_is_private_stable_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "state" / "eval_secret"
    secret = EvalSecret.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert EvalSecret.load_or_create(path) == secret
    assert len(secret.key) == 32
    assert secret.key.hex() not in repr(secret)
    assert repr(secret.key) not in repr(secret)
    assert EvalSecret.load_or_create(tmp_path / "other") != secret


def test_racing_creators_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(EvalSecret.load_or_create, [tmp_path / "secret"] * 16))
    assert len(found) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]


def test_an_unusable_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="5 bytes"):
        EvalSecret.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        EvalSecret.load_or_create(path)
    with pytest.raises(ConfigError, match="cannot use"):
        EvalSecret.load_or_create(path / "below")


def test_commitments_bind_secret_and_split() -> None:
    found = {commitment(secret, split) for secret in (SECRET, OTHER) for split in HIDDEN}
    assert len(found) == 6
    assert not any(SECRET.key.hex() in entry for entry in found)


def test_wrong_requests_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="not a hidden set"):
        hidden_items("ledger", "dev", 1, SECRET)
    with pytest.raises(ConfigError, match="unknown family"):
        dev_items("nothing", 1)
