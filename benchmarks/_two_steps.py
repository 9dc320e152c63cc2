"""The smallest playbook that hands something on: what starting costs is nearly all that it costs."""

PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: two, path: bench/two}
workflow:
  - step: start
    tool: {kind: python, code: "result = {'n': 1}"}
    next: {arcs: [{step: finish}]}
  - step: finish
    tool: {kind: python, input: {n: "{{ start.n }}"}, code: "result = n + 1"}
"""
