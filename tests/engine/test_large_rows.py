"""Playbooks over results that are in chunks: loops, checks, selected fields, the same values as small ones."""

from __future__ import annotations

from typing import Any

import pytest
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings
