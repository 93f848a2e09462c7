"""The environments that a config can name. A new one is a file in this folder and a line in `ENVIRONMENTS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from soloist.config import EnvironmentConfig
from soloist.environments.base import Environment
from soloist.environments.calculator import Calculator
from soloist.errors import UserError

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {"calculator": Calculator}


def build_environment(config: EnvironmentConfig, seed: int, **options: Any) -> Environment:
    """The environment that `config.name` names; `options` are its own keywords (shares of demonstrations).

    Raises UserError for an unknown name and for what the environment itself refuses (a bad task file).
    """
    if config.name not in ENVIRONMENTS:
        known = ", ".join(sorted(ENVIRONMENTS))
        raise UserError(f"environment.name = {config.name!r} is not known; choose one of: {known}")
    return ENVIRONMENTS[config.name](config, seed, **options)
