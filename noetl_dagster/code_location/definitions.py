"""Definitions of a code location from a folder of playbooks."""

from __future__ import annotations

import logging

from dagster import AssetsDefinition, Definitions

from noetl_dagster.code_location.beside import definitions_beside, has_assets_beside
from noetl_dagster.code_location.control import control_of
from noetl_dagster.code_location.loading import default_resource, load_playbooks
from noetl_dagster.playbook.loader import collector_paused
from noetl_dagster.settings import Settings

logger = logging.getLogger(__name__)


def build_definitions(settings: Settings) -> Definitions:
    """Every playbook of ``settings.playbooks_path`` that loads, and the assets in ``*_assets.py`` beside them."""
    folder = settings.playbooks_path
    if not folder.is_dir():
        logger.warning("there are no playbooks: %s is no folder; set NOETL_PLAYBOOKS_PATH", folder.absolute())
        return control_of([], default_resource())
    with_spark = has_assets_beside(folder)  # they may ask for the session
    with collector_paused():
        beside = definitions_beside(folder)
        in_python = [one for one in beside.assets or () if isinstance(one, AssetsDefinition)]
        return Definitions.merge(load_playbooks(folder, spark=with_spark, beside=in_python), beside)
