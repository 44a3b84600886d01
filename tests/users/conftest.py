"""Fixtures of the users' scripts."""

from __future__ import annotations

from tests.integration.conftest import programs

__all__ = ["programs"]
