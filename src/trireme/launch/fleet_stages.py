"""Fleet's variables of heterogeneous jobs, whose trainers are stage 1 and whose heterogeneous
workers, here compute workers, are the stages from 2 on.

They list all compute workers, but tell trainers no device of any. So all have the label gpu, unless
TRIREME_HETER lists them with labels. What else they say about stages is in the model here
(`trireme.Stages`), and only checked.
"""

from collections.abc import Mapping

from trireme.errors import BadRequest
from trireme.launch.stated_facts import Fact, Facts, is_set

ALL = "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST"
NEXT, PREVIOUS = (f"PADDLE_{side}_HETER_TRAINER_IP_PORT_LIST" for side in ("NEXT", "PREVIOUS"))
NUMS = "PADDLE_STAGE_TRAINERS_NUM"
DEVICE = "HETER_DEVICE_TYPE"
VARIABLES = (ALL, NEXT, PREVIOUS, NUMS, DEVICE, "STAGE_ID", "STAGE_NUM")
LABEL = "gpu"


def heter_facts(env: Mapping[str, str], role: str) -> Facts:
    """The compute workers of the job, and the label of this process if it is one.

    role: of this process: server, worker or heter. Raises BadRequest: some variables are missing,
    or they contradict each other.
    """
    if not is_set(env, ALL):
        if alone := [name for name in (NEXT, PREVIOUS, NUMS) if is_set(env, name)]:
            raise BadRequest(f"init: expected {ALL} beside {', '.join(alone)}, found none")
        return {}
    addresses = _split(env[ALL])
    facts = {"heter": Fact(",".join(f"{LABEL}={address}" for address in addresses), ALL)}
    _check_numbers(env, len(addresses))
    if role != "server":
        _check_stage(env, role, addresses)
    if role == "heter":
        _require(env, "POD_IP", "PADDLE_PORT", DEVICE)
        facts["label"] = Fact(env[DEVICE].strip(), DEVICE)
    return facts


def _require(env: Mapping[str, str], *names: str) -> None:
    if missing := [name for name in names if not is_set(env, name)]:
        raise BadRequest(
            f"init: expected {', '.join(missing)} of a process with TRAINING_ROLE=HETER_TRAINER,"
            " found none"
        )


def _check_numbers(env: Mapping[str, str], num_heter: int) -> None:
    """Check the workers of each stage, as [2, 1, 1]; the first stage has the trainers."""
    if not is_set(env, NUMS):
        return
    text = env[NUMS].strip()
    numbers = [part.strip() for part in text.removeprefix("[").removesuffix("]").split(",")]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise BadRequest(f"init: expected {NUMS} as [2, 1], workers by stage, found {text!r}")
    trainers = env.get("PADDLE_TRAINERS_NUM", "").strip() or numbers[0]
    if numbers[0] != trainers or sum(map(int, numbers[1:])) != num_heter:
        raise BadRequest(
            f"init: expected {NUMS} to count {trainers} workers (PADDLE_TRAINERS_NUM) and then the"
            f" {num_heter} of {ALL}, found {text}"
        )
    if (num_stages := env.get("STAGE_NUM", "").strip()) not in ("", str(len(numbers))):
        raise BadRequest(
            f"init: expected STAGE_NUM to be the length of {NUMS}={text}, found {num_stages}"
        )


def _check_stage(env: Mapping[str, str], role: str, addresses: list[str]) -> None:
    """Check the stage of this process, and who is before and after it."""
    num = Fact(env["STAGE_NUM"], "STAGE_NUM").integer(low=2) if is_set(env, "STAGE_NUM") else None
    if is_set(env, "STAGE_ID"):
        stage = Fact(env["STAGE_ID"], "STAGE_ID").integer(low=1)
        if (stage == 1) != (role == "worker") or stage > (num or stage):
            wanted = (
                "1 of a trainer" if role == "worker" else f"2 to {num or '...'} of HETER_TRAINER"
            )
            raise BadRequest(f"init: expected STAGE_ID {wanted}, found {stage}")
    known = {*addresses, *_split(env.get("PADDLE_TRAINER_ENDPOINTS", ""))}
    for name in (NEXT, PREVIOUS):
        if others := [a for a in _split(env.get(name, "")) if a not in known]:
            raise BadRequest(
                f"init: expected {name} to name workers of {ALL} or PADDLE_TRAINER_ENDPOINTS, found"
                f" {', '.join(others)}"
            )


def _split(text: str) -> list[str]:
    """Fleet separates stages by semicolons in its options, and in some of its variables."""
    return [part.strip() for part in text.replace(";", ",").split(",") if part.strip()]
