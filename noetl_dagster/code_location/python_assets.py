"""Ordinary Dagster assets next to the playbooks: ``*_assets.py`` in their folder.

Such an asset takes the result of a playbook's step by its key, ``[<parts of metadata.path>..., <step>]``.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from dagster import (
    AssetChecksDefinition,
    AssetKey,
    Definitions,
    JobDefinition,
    load_asset_checks_from_modules,
    load_assets_from_modules,
)

# private: the type of what define_asset_job returns
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from noetl_dagster.playbook.catalog import files_below

logger = logging.getLogger(__name__)

PATTERN = "*_assets.py"
_CHECK = re.compile(r"\b(multi_)?asset_check\b")


def definitions_in_python(folder: Path) -> Definitions:
    """Returns the assets, checks and jobs of the files below a folder.

    A file that does not load is left out, with its error in the log, and the playbooks load without it.
    """
    modules = []
    for path in files_below(folder, PATTERN):
        with _left_out_if_broken(path):
            module = _module(path)
            jobs = [
                one for one in vars(module).values() if isinstance(one, (JobDefinition, UnresolvedAssetJobDefinition))
            ]
            assets = load_assets_from_modules([module])
            checks = load_asset_checks_from_modules([module])
            modules.append(Definitions(assets=assets, asset_checks=checks, jobs=jobs))
    return Definitions.merge(*modules)


def checks_in_python(folder: Path, assets: Collection[AssetKey]) -> list[AssetChecksDefinition]:
    """Returns the checks in the files below a folder that are only about given assets.

    Files that have none are not imported: what they import may take a while.
    """
    checks: list[AssetChecksDefinition] = []
    for path in files_below(folder, PATTERN):
        if _CHECK.search(path.read_text(encoding="utf-8", errors="replace")) is not None:
            with _left_out_if_broken(path):
                checks += load_asset_checks_from_modules([_module(path)])
    return [one for one in checks if {key.asset_key for key in one.check_keys} <= set(assets)]


@contextmanager
def _left_out_if_broken(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("the assets of %s are left out", path)


def _module(path: Path) -> ModuleType:
    """Imports a file under its own name; it may import the files beside it."""
    if (folder := str(path.parent.absolute())) not in sys.path:
        sys.path.append(folder)
    if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path.absolute()):
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module
