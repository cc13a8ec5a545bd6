"""The configuration of a training directory: .train/config.toml."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from .arithmetic import F32_MAX
from .errors import TrainError
from .rules import RULES, make_rule

SyncKind = Literal["bsp", "quorum", "ssp", "async", "local"]
Nonfinite = Literal["refuse", "skip", "count"]
Staleness = Literal["none", "inverse"]
_SYNC = re.compile(r"(bsp|async)|(quorum|ssp|local):(\d{1,6})")
_WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_Names = tuple[Annotated[str, Meta(pattern=rf"\A{_WORKER.pattern}\Z")], ...]
_Fp32 = Annotated[float, Meta(ge=-F32_MAX, le=F32_MAX)]


class Sync(NamedTuple):
    """A rule for who waits for whom; `number` is Q, S or H (docs/training.md)."""

    kind: SyncKind
    number: int = 0


def parse_sync(text: str) -> Sync:
    """Read "bsp", "async", "quorum:3", "ssp:2" or "local:100". Raises TrainError."""
    found = _SYNC.fullmatch(text)
    if found is None or (found[2] in ("quorum", "local") and int(found[3]) == 0):
        raise TrainError(f"sync is bsp, async, quorum:Q, ssp:S or local:H, not {text!r}")
    kind: Any = found[1] or found[2]
    return Sync(kind, int(found[3] or 0))


def is_worker_name(text: str) -> bool:
    """Return whether a worker can have this name: it is part of file names."""
    return _WORKER.fullmatch(text) is not None


@dataclass(frozen=True)
class TrainConfig:
    """The keys of config.toml.

    `lr`: None is the rule's default. `workers`: "auto", a number, or names. `nonfinite`: a push with NaN or
    infinity is refused, skipped (it counts, with weight 0), or counted (it takes part). `staleness`:
    "inverse" has a push count 1 / (1 + versions since its base) of what it would. `keep`: versions that
    stay. `whole_every`: of every so many versions a file with all parameters is made (0: of none).
    """

    rule: Annotated[str, Meta(description="text")] = "sgd"
    lr: Annotated[_Fp32 | None, Meta(description="a number of fp32")] = None
    options: Annotated[Mapping[str, Any], Meta(description="a table")] = field(default_factory=dict)
    sync: Annotated[str, Meta(description="text")] = "bsp"
    workers: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1)] | Annotated[_Names, Meta(min_length=1)],
        Meta(description="auto, a number, or a list of names"),
    ] = "auto"
    clip_norm: Annotated[
        float, Meta(ge=0, le=F32_MAX, description="a number of fp32 that is at least 0")
    ] = 0.0
    nonfinite: Annotated[Nonfinite, Meta(description="refuse, skip or count")] = "refuse"
    staleness: Annotated[Staleness, Meta(description="none or inverse")] = "none"
    keep: Annotated[int, Meta(ge=2, description="a whole number that is at least 2")] = 3
    whole_every: Annotated[int, Meta(ge=0, description="a whole number that is at least 0")] = 1

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            value = getattr(self, name)
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError:
                meaning = get_args(kind)[1].description
                raise TrainError(f"{name} is {meaning}, not {value!r}") from None
        parse_sync(self.sync)
        try:
            make_rule(self.rule, self.options)
        except ValueError as error:
            raise TrainError(str(error)) from None
        rule = RULES[self.rule]
        apart = self.synchronization.kind in ("ssp", "async")
        if self.staleness == "inverse" and apart and rule.combine == "mean" and not rule.default_lr:
            raise TrainError(f"the rule {self.rule} has no learning rate that staleness lowers")

    @property
    def synchronization(self) -> Sync:
        return parse_sync(self.sync)

    @property
    def learning_rate(self) -> float:
        """Return the configured rate, or the rule's default."""
        return self.lr if self.lr is not None else RULES[self.rule].default_lr or 0.0

    def toml(self) -> str:
        """Return the text of config.toml."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        options = values.pop("options")
        # Texts, numbers and lists in JSON are also valid TOML.
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        lines += ["", "[options]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in options.items()]
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, path: Path, text: bytes) -> TrainConfig:
        """Read the text of config.toml. Raises TrainError, which names the file."""
        try:
            values = tomllib.loads(text.decode())
            known = [one.name for one in fields(cls)]
            if unknown := sorted(values.keys() - set(known)):
                raise TrainError(f"unknown keys: {', '.join(unknown)}; keys are {', '.join(known)}")
            if isinstance(values.get("workers"), list):
                values["workers"] = tuple(values["workers"])
            return cls(**values)
        except (ValueError, RecursionError, TrainError) as error:
            raise TrainError(f"{path}: {error}") from None


_TYPES = get_type_hints(TrainConfig, include_extras=True)
