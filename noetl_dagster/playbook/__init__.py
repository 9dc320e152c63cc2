"""The playbook language: models, loading with line numbers, templates, the step graph."""
