"""What the environment says of this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trireme.doctor.finding import Finding, ok, problem
from trireme.errors import BadRequest
from trireme.launch.environment import job_variables, unknown_variables
from trireme.launch.process_role import ProcessRole, read_role


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
