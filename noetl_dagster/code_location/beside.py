"""Ordinary Dagster assets beside the playbooks: ``*_assets.py`` in their folder.

Such an asset takes the result of a playbook's step by its key, ``[<parts of metadata.path>..., <step>]``.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

from dagster import (
    Definitions,
    JobDefinition,
    load_asset_checks_from_modules,
    load_assets_from_modules,
)

from noetl_dagster.dagster_internals import UnresolvedAssetJobDefinition

logger = logging.getLogger(__name__)

PATTERN = "*_assets.py"


def definitions_beside(folder: Path) -> Definitions:
    """Assets, checks and jobs of the files below a folder. A file that does not load is left out, with its
    error in the log: it must not take the playbooks with it."""
    found = []
    for path in sorted(folder.rglob(PATTERN)):
        try:
            found.append(_definitions_in(_module(path)))
        except Exception:
            logger.exception("the assets of %s are left out", path)
    return Definitions.merge(*found)


def has_assets_beside(folder: Path) -> bool:
    """Whether there is any such file below a folder."""
    return next(folder.rglob(PATTERN), None) is not None


def _definitions_in(module: ModuleType) -> Definitions:
    jobs = [
        one for one in vars(module).values() if isinstance(one, (JobDefinition, UnresolvedAssetJobDefinition))
    ]
    return Definitions(
        assets=load_assets_from_modules([module]),
        asset_checks=load_asset_checks_from_modules([module]),
        jobs=jobs,
    )


def _module(path: Path) -> ModuleType:
    """A file as a module of its own name; the files beside it can be imported."""
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
