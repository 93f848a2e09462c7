"""The pages about algorithms say what the code does: tables, functions, metrics, settings, recipes and links exist."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import soloist
from soloist.config import AdvantageConfig, RunConfig, build_config
from soloist.config_files import apply_overrides, dump_config, load_config, packaged_recipes
from soloist.estimators import ADV_ESTIMATORS
from soloist.methods import LOSS_METHODS
from soloist.metrics import METRICS, is_registered
from soloist.training.replay import CHANGEABLE, without_old_method

PACKAGE = Path(soloist.__file__).parent
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "algorithms"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
SECTIONS = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
METRIC_FAMILIES = {name.split("/")[0] for name in METRICS}
OF_METHODS = {
    "actor",
    "critic",
    "dis",
    "ppo",
    "correction",
    "cispo",
    "m2po",
    "tv",
    "sat",
    "advantage",
    "off_policy",
}
METHOD_RECIPES = {name for name in packaged_recipes() if name.startswith("methods/")}

Row = dict[str, str]


def table(header: str) -> dict[str, Row]:
    """Rows of the table of README.md whose first column is headed `header`, by their name."""
    lines = iter(PAGES["README.md"].splitlines())
    columns: list[str] = []
    rows: dict[str, Row] = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not columns and cells[0] == f"`{header}`":
            columns = cells
            next(lines)  # the line of dashes
        elif columns and not line.startswith("|"):
            break
        elif columns:
            assert len(cells) == len(columns), line
            rows[cells[0].strip("`")] = dict(zip(columns, cells, strict=True))
    return rows


def settings_of(cell: str) -> dict[str, str]:
    """`` `eps_low` 0.3, `order` value_first `` as a mapping."""
    return {} if cell == "none" else dict(re.findall(r"`(\w+)` ([\w.-]+)", cell))


def as_written(value: Any) -> str:
    """A value as the tables write it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def spans(text: str) -> set[str]:
    """Inline code, without blocks."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", prose))


def names_of(path: Path) -> set[str]:
    """Functions, classes and constants of a file, members as `Class.member`."""

    def defined(body: list[ast.stmt], prefix: str) -> set[str]:
        found: set[str] = set()
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(prefix + node.name)
            elif isinstance(node, ast.ClassDef):
                found |= {prefix + node.name} | defined(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign):
                found.add(prefix + ast.unparse(node.target))
            elif isinstance(node, ast.Assign):
                found |= {prefix + ast.unparse(target) for target in node.targets}
        return found

    return defined(ast.parse(path.read_text(encoding="utf-8")).body, "")


def file_named(name: str) -> Path:
    """Where a file lies that a page names: in the package, or from the root of the repository."""
    return PACKAGE / name if (PACKAGE / name).exists() else ROOT / name


def test_the_table_of_losses_has_the_methods_and_values_of_the_code() -> None:
    rows = table("policy_loss")
    assert list(rows) == list(LOSS_METHODS)
    for name, method in LOSS_METHODS.items():
        row, settings = rows[name], {key: as_written(value) for key, value in method.settings.items()}
        parts: dict[str, str] = {"ratio": method.ratio, "region": method.region, "surrogate": method.surrogate}
        parts |= {"correction": method.correction, "aggregation": method.loss_agg_mode, "source": method.source}
        assert {key: row[key] for key in parts} == parts
        assert row["old log-probs"] == ", ".join(method.old_log_probs)
        assert settings_of(row["settings"]) == settings, name


def test_the_table_of_estimators_has_the_needs_and_defaults_of_the_code() -> None:
    rows = table("adv_estimator")
    assert list(rows) == list(ADV_ESTIMATORS)
    for name, estimator in ADV_ESTIMATORS.items():
        needs = {"value model": estimator.critic, "groups": estimator.groups, "repeated tasks": estimator.repeats}
        defaults = {key: as_written(AdvantageConfig.model_fields[key].default) for key in estimator.settings}
        assert rows[name]["needs"] == (", ".join(key for key, needed in needs.items() if needed) or "nothing")
        assert settings_of(rows[name]["settings"]) == defaults
        assert rows[name]["source"] == estimator.source


@pytest.mark.parametrize(("header", "key"), [("policy_loss", "loss"), ("adv_estimator", "advantage")])
def test_the_recipes_and_pages_of_a_row_are_about_its_method(header: str, key: str) -> None:
    rows = table(header)
    for name, row in rows.items():
        recipes = re.findall(r"`([\w/]+)`", row["recipe"])
        assert recipes
        assert {getattr(getattr(load_config(recipe), key), header) for recipe in recipes} == {name}
        page = re.findall(r"\((\w+\.md)\)", row["page"])[0]
        assert f"`{name}`" in PAGES[page]
        assert f"soloist run {recipes[0]}" in PAGES[page] or recipes[0] == "methods/dis"
    assert len(rows) > 5


def test_every_packaged_recipe_of_a_method_is_in_a_table_and_has_its_command_on_a_page() -> None:
    in_tables = {
        recipe
        for header in ("policy_loss", "adv_estimator")
        for row in table(header).values()
        for recipe in re.findall(r"`([\w/]+)`", row["recipe"])
    }
    assert in_tables == METHOD_RECIPES
    commands = {recipe for text in PAGES.values() for recipe in re.findall(r"soloist run (methods/\w+)", text)}
    assert METHOD_RECIPES - commands == {"methods/dis"}  # the same run as `calculator`, which has its command
    assert commands <= METHOD_RECIPES


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_function_that_a_page_names_exists(page: str) -> None:
    named = [span.split(": ", 1) for span in spans(PAGES[page]) if re.match(r"[\w/]+\.py: ", span)]
    missing = [
        f"{file}: {name}"
        for file, names in named
        for name in names.split(", ")
        if name not in names_of(file_named(file))
    ]
    assert missing == []
    assert len(named) >= 3
    files = {span for span in spans(PAGES[page]) if re.fullmatch(r"[\w/]+\.py", span)}
    assert [file for file in sorted(files) if not file_named(file).is_file()] == []


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_metric_recipe_and_setting_that_a_page_names_exists(page: str) -> None:
    found = spans(PAGES[page])
    paths = {span for span in found if re.fullmatch(r"[\w@*]+(/[\w@*]+)+", span)}
    metrics = {path for path in paths if path.split("/")[0] in METRIC_FAMILIES}
    assert [name for name in sorted(metrics) if not (is_registered(name) or name in METRICS)] == []
    others = {path for path in paths - metrics if path not in METHOD_RECIPES and not file_named(path).exists()}
    assert others == set()
    keys = {match.groups() for span in found if (match := re.match(r"(\w+)\.([a-z_]+)( = |$)", span))}
    unknown = [
        f"{section}.{key}"
        for section, key, _ in sorted(keys)
        if section in SECTIONS and key not in SECTIONS[section].model_fields
    ]
    assert unknown == []
    assert metrics


def test_every_metric_of_these_families_is_explained_on_a_page() -> None:
    named = {span for text in PAGES.values() for span in spans(text)}
    assert [name for name in METRICS if name.split("/")[0] in OF_METHODS and name not in named] == []
    assert "group/dropped" in named
    assert METRIC_FAMILIES >= OF_METHODS


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGES[page])
    for link in links:
        file, _, anchor = link.partition("#")
        target = (FOLDER / file).resolve()
        assert target.is_file(), link
        if not anchor:  # which may be a picture
            continue
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}
    assert links
    assert page == "README.md" or f"({page})" in PAGES["README.md"]


def commands(start: str) -> list[list[str]]:
    """Words of the commands in the pages' blocks that begin with `start`, without `start` and comments."""
    lines = [line for text in PAGES.values() for line in text.replace("\\\n", " ").splitlines()]
    return [line.removeprefix(start).split("#")[0].split() for line in lines if line.startswith(start)]


def test_the_commands_on_the_pages_have_settings_that_are_accepted() -> None:
    runs = commands("soloist run ")
    for recipe, *options in runs:
        pairs = zip(options[::2], options[1::2], strict=True)
        config = load_config(recipe, {option.removeprefix("--"): value for option, value in pairs})
        assert config.name
    assert len(runs) > 20


def test_the_what_ifs_on_the_pages_have_settings_that_are_accepted() -> None:
    resolved = tomllib.loads(dump_config(load_config("calculator")))
    replays = commands("soloist replay ")
    for run, *options in replays:
        assert run == "runs/calculator"
        changes = dict(option.split("=") for option in options if option != "--set")
        assert {change.split(".")[0] for change in changes} <= set(CHANGEABLE)
        config = build_config(apply_overrides(without_old_method(resolved, changes), changes), source=run)
        found = [getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in changes]
        assert [str(value) for value in found] == list(changes.values())
    assert len(replays) >= 2
