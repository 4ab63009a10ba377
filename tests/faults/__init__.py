"""Faults on purpose: docs/reliability.md says which test covers which."""
