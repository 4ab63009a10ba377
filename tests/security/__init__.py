"""SECURITY.md's promises, P1 to P10, each with its test."""
