"""What playbooks ask of pods, in the words of ``dagster-k8s``.

``tags`` says it of runs and ops, ``holding`` keeps an execution driven whose steps run in pods. Gives both to the
job and its executor. Stands on ``attach``.
"""
