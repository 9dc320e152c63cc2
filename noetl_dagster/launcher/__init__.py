"""Warm processes from which Dagster runs start by fork, for the API, sensors, schedules, the UI and the command line.

``server`` forks, ``driver`` is what it forks, ``warm`` is Dagster's launcher, ``executions`` the API's,
``foreground`` that of the command line, ``compute_logs`` and ``stored_logs`` keep what runs print. Gives launchers
to ``dagster.yaml`` and to the command line. Stands on ``code_location``, ``compiler``, ``embedded``, ``engine``,
``events``, ``executors``, ``playbook``, ``resources``, ``service`` and ``storage``.
"""
