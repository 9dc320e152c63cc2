"""What makes a cold JVM warm: its class-data archive, and the work that is done ahead of a step's own.

Gives both to ``sessions``, which starts with them, and to ``archiving``, which makes the archive. Stands on
the ground floor.
"""
