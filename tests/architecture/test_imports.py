"""Imports go one way, from layer to layer and inside packages, and few packages know Dagster."""

from __future__ import annotations

from tests.architecture.imports import cycle_of, imports_of, modules, packages

LAYERS = (
    {"errors", "extras", "setting_types", "settings", "result_ref", "machine", "private_files", "values"},
    {"process"},
    {"playbook", "embedded"},
    {"events"},
    {"storage"},
    {"spark"},
    {"tools"},
    {"worker"},
    {"engine"},
    {"pool_worker", "resources", "io_managers", "service"},
    {"compiler"},
    {"sensors"},
    {"code_location"},
    {"launcher"},
    {"definitions", "cli", "testing"},
    {"__main__"},
)
"""From the bottom up. A package imports only from the layers below its own."""

BOTTOM = LAYERS[0]
"""Single modules that every layer may use. They may import each other."""

IMPORT_DAGSTER = {
    "resources",
    "io_managers",
    "compiler",
    "sensors",
    "code_location",
    "definitions",
    "cli",
    "launcher",
}

IMPORT_DAGSTER_TOO = {"noetl_dagster.tools.access.managers.aws"}
"""Single modules of other packages: the AWS clients come from dagster-aws, which is imported on first use."""


MOST_MODULES = 16
"""Modules directly in one package."""


def test_imports_go_down() -> None:
    levels = {part: level for level, parts in enumerate(LAYERS) for part in parts}
    own_parts = {part for name in modules() if (part := part_of(name)) is not None}
    assert not own_parts - levels.keys(), (
        f"in no layer: {own_parts - levels.keys()}. Add each to LAYERS above all that it imports"
    )
    found = [
        f"{one.place}, but {other} is not below {own}"
        for name in modules()
        if (own := part_of(name)) is not None
        for one in imports_of(name)
        if (other := part_of(one.module)) is not None
        and other != own
        and not (own in BOTTOM and other in BOTTOM)
        and levels[other] >= levels[own]
    ]
    assert not found, (
        "\n".join(found)
        + "\nMove what is imported to a layer below both, pass it as an argument, or let the lower module "
        "declare a Protocol that the upper one implements"
    )


def test_few_packages_import_dagster() -> None:
    found = [
        one.place
        for name in modules()
        if (own := part_of(name)) is not None and own not in IMPORT_DAGSTER and name not in IMPORT_DAGSTER_TOO
        for one in imports_of(name)
        if one.module.startswith("dagster")
    ]
    assert not found, (
        "\n".join(found) + f"\nOnly {', '.join(sorted(IMPORT_DAGSTER))} know Dagster. Put the part that "
        "needs Dagster into one of them, and let it call this module"
    )


def test_no_package_has_an_import_cycle() -> None:
    found = [f"{package}:\n  " + "\n  ".join(cycle) for package, _ in packages() if (cycle := cycle_of(package))]
    assert not found, (
        "modules and sub-packages import each other in a cycle\n"
        + "\n".join(found)
        + "\nMove what both need into a module below both, or let the lower one declare a Protocol that the "
        "upper one implements; an import inside a function or for types alone is an import too"
    )


def test_no_package_is_crowded() -> None:
    found = [f"{package} has {len(inside)}" for package, inside in packages() if len(inside) > MOST_MODULES]
    assert not found, (
        f"more than {MOST_MODULES} modules: {', '.join(found)}. Put modules that change together into a "
        "sub-package, whose __init__ says what lives there"
    )


def part_of(module: str) -> str | None:
    """Returns the module or package directly below ``noetl_dagster`` that contains a dotted name, if any."""
    names = module.split(".")
    return names[1] if names[0] == "noetl_dagster" and len(names) > 1 else None
