"""Imports go one way, from floor to floor and inside the halls, and only the thin faces know Dagster."""

from __future__ import annotations

import pytest

from tests.architecture.house import ROOT, circles_of, imports_of, modules, rooms

LAYERS = (
    {"errors", "settings", "result_ref", "machine", "dagster_internals"},
    {"process"},
    {"playbook", "embedded"},
    {"events"},
    {"storage"},
    {"spark"},
    {"tools"},
    {"worker"},
    {"engine"},
    {"pool_worker", "resources", "io_managers"},
    {"compiler"},
    {"sensors", "service"},
    {"code_location"},
    {"launcher"},
    {"definitions", "cli", "testing"},
    {"__main__"},
)
"""From the bottom up. A package imports only from the layers below its own."""

BOTTOM = LAYERS[0]
"""Single modules that every layer may use. They may import each other."""

IMPORT_DAGSTER = {
    "dagster_internals",
    "resources",
    "io_managers",
    "compiler",
    "sensors",
    "service",
    "code_location",
    "definitions",
    "cli",
    "launcher",
}

IMPORT_DAGSTER_TOO = {"noetl_dagster.tools.access.aws"}
"""Single modules of other packages: the AWS clients come from dagster-aws, which is imported on first use."""

PRIVATE = ("dagster._", "dagster_pyspark._", "dagster_postgres._", "dagster_k8s._", "dagster_aws._")

MOST_SIDE_BY_SIDE = 16

NAMES = sorted(modules())
PACKAGES = [name for name, _ in rooms()]


def part_of(module: str) -> str | None:
    """The module or package below ``noetl_dagster`` that a dotted name belongs to."""
    names = module.split(".")
    return names[1] if names[0] == "noetl_dagster" and len(names) > 1 else None


def layer_of(part: str) -> int:
    for level, parts in enumerate(LAYERS):
        if part in parts:
            return level
    pytest.fail(f"noetl_dagster.{part} stands on no floor: add it to LAYERS above all that it imports")


@pytest.mark.parametrize("name", NAMES)
def test_imports_go_down(name: str) -> None:
    own = part_of(name)
    if own is None:
        return
    for one in imports_of(modules()[name]):
        other = part_of(one.module)
        if other is None or other == own or (own in BOTTOM and other in BOTTOM):
            continue
        assert layer_of(other) < layer_of(own), (
            f"{modules()[name].relative_to(ROOT)}:{one.line} imports {one.module}, but {other} does not stand "
            f"below {own}. Move what is imported to the floor where both may reach it, hand it in as an "
            f"argument, or let {own} name a Protocol that {other} fulfils"
        )


@pytest.mark.parametrize("name", NAMES)
def test_only_the_faces_import_dagster(name: str) -> None:
    own = part_of(name)
    if own in IMPORT_DAGSTER or own is None or name in IMPORT_DAGSTER_TOO:
        return
    for one in imports_of(modules()[name]):
        assert not one.module.startswith("dagster"), (
            f"{modules()[name].relative_to(ROOT)}:{one.line} imports {one.module}; only "
            f"{', '.join(sorted(IMPORT_DAGSTER))} know Dagster. Put the Dagster half into one of them, and let "
            "it call this module"
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_ties_a_hall(package: str) -> None:
    circle = circles_of(package)
    assert not circle, (
        f"modules and rooms of {package} import each other in a circle:\n  "
        + "\n  ".join(circle)
        + "\nMove what both need into a module below both, or let the lower one name a Protocol that the "
        "upper one fulfils; an import inside a function or for types alone is an import too"
    )


@pytest.mark.parametrize(("package", "side_by_side"), list(rooms()), ids=PACKAGES)
def test_no_hall_is_crowded(package: str, side_by_side: list[str]) -> None:
    assert len(side_by_side) <= MOST_SIDE_BY_SIDE, (
        f"{package} has {len(side_by_side)} modules side by side, {MOST_SIDE_BY_SIDE} at most. Give those that "
        "change together a room, a sub-package, whose __init__ says what lives there"
    )


def test_private_modules_of_dagster_stand_in_one_place() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{one.line} imports {one.module}"
        for name, path in modules().items()
        if part_of(name) != "dagster_internals"
        for one in imports_of(path)
        if one.module.startswith(PRIVATE)
    ]
    assert not found, (
        "\n".join(found)
        + "\nDagster may move its private modules in any release. Look for a public way first; "
        "else add the name to noetl_dagster/dagster_internals.py with its use and what replaces it"
    )
