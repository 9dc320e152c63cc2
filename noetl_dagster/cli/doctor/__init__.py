"""What a deployment needs, tried: addresses, credentials, folders and programs of the settings.

Gives ``examine`` to the command ``doctor``: a finding of one line for each thing. Stands on the ground floor.
"""
