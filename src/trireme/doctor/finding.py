"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found, and what to do about it.

    Attributes:
        status: ok; note: a job runs, but slower or not in every mode; problem: a job does not run.
        text: a short sentence. advice: what to do; "" if nothing.
    """

    status: Status
    text: str
    advice: str = ""


def ok(text: str) -> Finding:
    return Finding(status="ok", text=text)


def note(text: str, advice: str) -> Finding:
    return Finding(status="note", text=text, advice=advice)


def problem(text: str, advice: str) -> Finding:
    return Finding(status="problem", text=text, advice=advice)
