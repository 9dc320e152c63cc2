"""Traces: what an execution did, as spans over OTLP; nothing of it is loaded, and no thread runs, while it is off.

Whoever writes the event that ends something records its span then. Ids are functions of names that everybody knows:
drivers, helpers, workers on other machines and resumed runs add to one trace without asking each other.

Gives a ``Trace`` to whoever runs a part of an execution, and the header that carries it to whoever is called. Stands
on the ground floor.
"""
