"""Where this machine keeps what outlives runs: the eval secret, baselines, the account."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from nestling.core.errors import ConfigError
from nestling.inner.baselines import state_folder
from nestling.store.account import Account

__all__ = [
    "LEAKS_FOLDER",
    "SECRET_FILE",
    "make_state_folder",
    "open_account",
]


_ACCOUNT_FILE: Final = "account.db"
LEAKS_FOLDER: Final = "leaks"
SECRET_FILE: Final = "eval-secret"  # noqa: S105 (a name)


def open_account() -> Account:
    """The account file of the state folder; close it."""
    return Account(make_state_folder() / _ACCOUNT_FILE)


def make_state_folder() -> Path:
    """The state folder, made when missing; ConfigError when it cannot be."""
    state = state_folder()
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"the state folder {state} cannot be made: {error.strerror}; expected a writable "
            "place for baselines and the eval secret; set NESTLING_STATE to another folder"
        ) from error
    return state
