"""From any accepted spelling of the language to the canonical model, one module a part of the playbook.

``spelling`` holds the words, ``block`` reads one mapping and reports keys that nobody knows. Gives the
model of a document to the loader. Stands on ``assets``, ``document``, ``models``, ``pods``, ``templates``,
``tool_kinds`` and ``wording``.
"""
