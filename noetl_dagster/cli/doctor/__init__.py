"""Checks of everything that the settings name: addresses, credentials, folders and programs."""
