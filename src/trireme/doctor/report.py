"""All that is looked at, as text or JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping

from trireme.doctor.devices import gpus
from trireme.doctor.finding import Finding, ok, problem
from trireme.doctor.machine import cores, disk, limits, memory
from trireme.doctor.network import network
from trireme.doctor.software import core, python
from trireme.errors import BadRequest
from trireme.launch.environment import inherited, job_variables, unknown_variables
from trireme.launch.process_role import ProcessRole, read_role

WIDTH = 80
_INDENT = " " * 10

Sections = Mapping[str, list[Finding]]


def examine() -> Sections:
    """Look at everything; nothing is changed, and nothing leaves this machine but the question for
    the address of its name.
    """
    env = inherited()
    role = role_of(env)
    server_limits = None if isinstance(role, BadRequest) else role.limits
    return {
        "Software": [*python(), *core()],
        "Processor": list(cores()),
        "Memory": list(memory()),
        "GPU": list(gpus()),
        "Network": list(network()),
        "Limits": list(limits(server_limits)),
        "Disk": list(disk()),
        "Environment": list(variables(env)),
    }


def num_of(sections: Sections, status: str) -> int:
    """Findings with a status."""
    return sum(finding.status == status for findings in sections.values() for finding in findings)


def as_text(sections: Sections) -> str:
    """Lines of at most 80 characters, as far as words allow, and a summary."""
    lines = []
    for section, findings in sections.items():
        lines.append(section)
        for finding in findings:
            lines += _wrapped(finding.text, f"  {finding.status:8}")
            lines += _wrapped(finding.advice, _INDENT + "-> ") if finding.advice else []
    problems, notes = num_of(sections, "problem"), num_of(sections, "note")
    end = f"{problems} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}: "
    end += "a job would not run here" if problems else "nothing prevents a job"
    return "\n".join([*lines, end, ""])


def as_json(sections: Sections) -> str:
    """An object: problems, notes, and findings with section, status, text and advice."""
    listed = [
        {"section": section, "status": one.status, "text": one.text, "advice": one.advice}
        for section, findings in sections.items()
        for one in findings
    ]
    counts = {"problems": num_of(sections, "problem"), "notes": num_of(sections, "note")}
    return json.dumps(counts | {"findings": listed}, indent=2) + "\n"


def _wrapped(text: str, start: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def variables(env: Mapping[str, str]) -> Iterator[Finding]:
    """The role of a process with this environment, or why it has none."""
    unknown = unknown_variables(env)
    for name, near in unknown.items():
        yield problem(
            f"{name} is no variable of Trireme, and init() refuses it",
            f"did you mean {near}?" if near else "unset it",
        )
    for name in job_variables(env):
        yield ok(f"{name}={env[name]}")
    role = role_of(env)
    if isinstance(role, BadRequest):
        yield problem(str(role), "change or unset the variables")
    else:
        yield ok(f"a script here would be {role.describe().removeprefix('trireme: ')}")


def role_of(env: Mapping[str, str]) -> ProcessRole | BadRequest:
    """The role of a process with this environment, unknown variables apart."""
    unknown = unknown_variables(env)
    try:
        return read_role({name: value for name, value in env.items() if name not in unknown})
    except BadRequest as error:
        return error
