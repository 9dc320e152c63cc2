"""The pool of workers as the control plane sees it: commands out, claims, and ends back.

Gives a runner whose commands run elsewhere to the runtime, claims to the API. Stands on ``runtime``.
"""
