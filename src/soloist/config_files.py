"""Configs as files: packaged recipes by name, TOML by path, dotted overrides; and back to TOML and to a list of keys.

Floor 0, without torch. Raises UserError for what is not there or not TOML; what the values must be is `config.py`'s.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from soloist.config import RunConfig, build_config
from soloist.errors import UserError


def packaged_recipes() -> dict[str, Path]:
    """Recipes that come with the package, by name: `calculator`, `methods/gspo`."""
    folder = Path(str(resources.files("soloist") / "recipes"))
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.toml"))}


def read_recipe(name: str) -> dict[str, Any]:
    """Raw TOML of a packaged recipe (by name) or of a file (by path). Raises UserError."""
    recipes = packaged_recipes()
    path = recipes.get(name, Path(name))
    if not path.is_file():
        raise UserError(
            f"recipe '{name}' is neither a packaged recipe ({', '.join(recipes)}) nor a file; "
            "give one of those or a path"
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a TOML file: {error}") from error


def apply_overrides(raw: dict[str, Any], overrides: dict[str, str]) -> dict[str, Any]:
    """Set dotted keys (`policy.lr` → `3e-4`) in a raw config; values are TOML, else text. Raises UserError."""
    merged = dict(raw)
    for dotted, text in overrides.items():
        *sections, key = dotted.split(".")
        node = merged
        for section in sections:
            found = node.get(section) or {}
            if not isinstance(found, dict):
                raise UserError(f"--{dotted}: '{section}' holds {found!r} and is no section; name a key of a section")
            node[section] = dict(found)
            node = node[section]
        node[key] = _toml_value(text)
    return merged


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def load_config(name: str, overrides: dict[str, str] | None = None) -> RunConfig:
    """A recipe with overrides, checked. The run's name defaults to the recipe's. Raises UserError."""
    raw = read_recipe(name)
    raw.setdefault("name", Path(name).stem)
    return build_config(apply_overrides(raw, overrides or {}), source=name)


def dump_config(config: RunConfig) -> str:
    """The resolved config as TOML; reading it back gives the same config."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def describe_fields() -> list[tuple[str, str, str]]:
    """All keys as (dotted name, default, what it does), for `soloist config --help`."""
    rows: list[tuple[str, str, str]] = []

    def walk(section: type[BaseModel], prefix: str) -> None:
        for name, field in section.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                walk(field.annotation, f"{prefix}{name}.")
            else:
                rows.append((prefix + name, repr(field.default), field.description or ""))

    walk(RunConfig, "")
    return rows
