"""What a well-formed playbook may still have wrong, found without running it.

Gives problems with their place to the loader: targets and cycles, templates and names, code that does not
compile. Stands on ``code``, ``dialects``, ``document``, ``graph``, ``models``, ``templates``, ``tool_kinds`` and
``wording``.
"""
