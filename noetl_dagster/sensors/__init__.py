"""Thin Dagster sensors over the control plane and the transports.

They drain events from NATS, resume what was abandoned, and keep the projection up where nothing else does.
Gives sensors to the code location. Stands on ``compiler``, ``engine``, ``events``, ``io_managers``,
``playbook``, ``resources``, ``transport`` and ``worker``.
"""
