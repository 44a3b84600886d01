"""Labels: the names of kinds of compute workers."""

import re

_LABEL = re.compile(r"[a-z][a-z0-9_]{0,31}")


_NUMBER = re.compile(r"_[0-9]+$")


def is_label(text: str) -> bool:
    """Whether a kind of compute worker may be called so: as a keyword of `trireme.Stages`."""
    return _LABEL.fullmatch(text) is not None


def without_number(label: str) -> str:
    """What `gpu_2` is a second one of: `gpu`."""
    return _NUMBER.sub("", label)
