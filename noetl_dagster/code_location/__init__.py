"""The code location: a folder of playbooks as Definitions.

Its jobs, assets, sensors and schedules in one place, ordinary Python assets beside them, and runs in this
process. Gives ``build_definitions`` to ``definitions`` and ``launch`` to the command line. Stands on
``compiler``, ``io_managers``, ``lineage``, ``playbook``, ``resources``, ``schedules`` and ``sensors``.
"""
