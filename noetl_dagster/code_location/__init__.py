"""The code location: playbooks as Definitions, and runs of them in this process.

Their jobs, assets, sensors and schedules in one place, for a project of Python or of ``dg``; ordinary Python assets
beside them. Gives ``load_playbooks``, ``PlaybooksComponent`` and ``materialize_playbook`` to everybody,
``build_definitions`` to ``definitions`` and ``launch`` to the command line. Stands on ``compiler``, ``engine``,
``events``, ``io_managers``, ``lineage``, ``playbook``, ``resources``, ``scaffold``, ``schedules``, ``sensors`` and
``tools``.
"""
