"""Thin Dagster sensors over the control plane and the transports."""
