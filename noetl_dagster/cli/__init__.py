"""The command line, ``noetl-dagster``.

``app`` names the commands and says what each does with errors; the commands load when they are called.
Gives ``main`` to the console script. Stands on ``code_location``, ``compiler``, ``embedded``, ``engine``,
``events``, ``launcher``, ``playbook``, ``pool_worker``, ``resources``, ``scaffold``, ``service``, ``spark``,
``storage``, ``tools``, ``transport``, ``worker``.
"""

from noetl_dagster.cli.app import main

__all__ = ["main"]
