"""Pods, whose containers are processes of this machine."""
