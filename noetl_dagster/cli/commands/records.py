"""``records-api``: the command of the example ``records_api``."""

from __future__ import annotations

import sys
from importlib import import_module

from noetl_dagster.extras import shipped_folder

sys.path.append(str(shipped_folder("examples")))
records_api = import_module("records_api.__main__").serve
