"""Loads the Python function that a spark task names, ``function: "file.py:name"``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pyspark import cloudpickle

from noetl_dagster.errors import ToolError

_loading = threading.RLock()
"""Shards on several threads may load the same file at once: one executes it, the others wait."""


def load_function(address: str, folder: str) -> Callable[..., Any]:
    """Returns the function of ``path/to/file.py:name`` (relative to ``folder``) or ``package.module:name``.

    A file that has changed since it was loaded is loaded again.

    Raises:
        ToolError: there is no such file, module or function.
    """
    source, _, name = address.rpartition(":")
    if not source or not name.isidentifier():
        raise _unknown(address, "expected 'file.py:name' or 'package.module:name'")
    try:
        is_file = source.endswith(".py")
        module = _file_module(Path(folder, source)) if is_file else importlib.import_module(source)
    except (OSError, ImportError) as error:
        raise _unknown(address, str(error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise _unknown(address, f"it has no function {name!r}; there are {functions}")
    return function  # type: ignore[no-any-return]


def _file_module(path: Path) -> ModuleType:
    path = path.absolute()
    digest = hashlib.sha256(path.read_bytes() + str(path).encode()).hexdigest()[:12]
    name = f"_noetl_spark_{path.stem}_{digest}"
    with _loading:
        return sys.modules.get(name) or _executed(path, name)


def _executed(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    # executors cannot import a playbook's file, so its objects are pickled into the task
    cloudpickle.register_pickle_by_value(module)
    return module


def _unknown(address: str, why: str) -> ToolError:
    return ToolError(f"spark: function {address!r} cannot be loaded: {why}", kind="python")
