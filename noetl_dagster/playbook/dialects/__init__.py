"""From any accepted spelling of the language to the canonical model, one module a part of the playbook."""
