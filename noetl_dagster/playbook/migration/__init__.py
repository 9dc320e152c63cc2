"""Playbooks in older words, rewritten in those of today: comments, order, quotes and styles stay.

``words`` knows what becomes of what, ``nodes`` is the YAML as it stands in the file, ``merging`` leaves untouched
lines as they are. Gives ``rewriting.migrate`` to the command of that name. Stands on ``dialects``, ``loader``,
``models``, ``templates`` and ``tool_kinds``.
"""
