"""What was measured, as one document: every table, plot and sentence is made from it, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_omni_diffusion_compile.errors import BenchError
from vllm_omni_diffusion_compile.settings import Shape


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Sample(_Part):
    """One request that was answered.

    Args:
        shape: Number of its shape.
        first: Whether it was the first one of its shape since the server was ready.
        block: Which pass over the arms it belongs to; those of one block ran close together.
        at: Unix time in seconds at which it was sent.
        seconds: Until the last byte of the answer.
        peak_memory_mb: Most memory that the device held, as the server says; None if it does not.
    """

    shape: int = Field(ge=0)
    first: bool
    block: int = Field(ge=0)
    at: float
    seconds: float = Field(gt=0)
    peak_memory_mb: float | None = None


class Metric(_Part):
    """One line of the server's /metrics that is about compilation."""

    name: str
    labels: dict[str, str]
    value: float


class Start(_Part):
    """One server: how it was started, and what it did.

    Args:
        arm: Name of its arm.
        cold: Whether its compile cache was empty.
        at: Unix time in seconds at which the process was started.
        command: All of it.
        environment: What was set beside the environment of the bench.
        ready_s: Seconds from there to the first answer of /health; None if it did not get ready.
        samples: Requests, in the order in which they were sent.
        metrics: Of compilation, after the last request.
        report: Of the warmup, as the server tells it.
        stayed_dense: Why attention that was to be block-sparse was not, in some of its calls, as the log says.
        failed: What went wrong; None if nothing did.
        log_tail: Last lines of its log, if something did.
    """

    arm: str
    cold: bool
    at: float
    command: list[str]
    environment: dict[str, str]
    ready_s: float | None = None
    samples: list[Sample] = Field(default_factory=list)
    metrics: list[Metric] = Field(default_factory=list)
    report: dict[str, Any] | None = None
    stayed_dense: list[str] = Field(default_factory=list)
    failed: str | None = None
    log_tail: str | None = None


class ArmEntry(_Part):
    """One arm that was asked for.

    Args:
        name: As it is typed.
        flags: What `vllm serve` needs for it, the arguments for every arm included.
        not_measured: Why it is not, or only in part, measured; None if everything was.
    """

    name: str
    flags: list[str]
    not_measured: str | None = None


class Plan(_Part):
    """What was to be measured.

    Args:
        model: As it was typed.
        task: What the model makes.
        task_from: Who says so.
        shapes: What was asked for, and declared to every server.
        bodies: The request of each shape.
        requests: Requests of each shape in a block, after the first one.
        rounds: Starts of each arm; the first one is cold.
        together: Whether the servers of all arms ran at once after their cold start.
        offline: Whether `Omni` was used instead of a server.
        arguments: For the `vllm serve` of every arm.
        seed: Of every request.
        budget_s: Seconds that all of it might take.
        ready_timeout_s: Seconds that one start might take.
    """

    model: str
    task: Literal["image", "video"]
    task_from: str
    shapes: list[Shape] = Field(min_length=1)
    bodies: list[dict[str, Any]]
    requests: int = Field(ge=1)
    rounds: int = Field(ge=2)
    together: bool
    offline: bool
    arguments: list[str]
    seed: int
    budget_s: float | None
    ready_timeout_s: float


class Result(_Part):
    """One run of the bench.

    Args:
        version: Of this document.
        command: What was typed.
        began_at: Unix time in seconds.
        seconds: What it took.
        versions: Of what took part.
        hardware: Of the machine.
        plan: What was to be measured.
        arms: In the order in which they were given.
        starts: In the order in which they ran.
    """

    version: Literal[1] = 1
    command: list[str]
    began_at: float
    seconds: float
    versions: dict[str, str]
    hardware: dict[str, Any]
    plan: Plan
    arms: list[ArmEntry]
    starts: list[Start] = Field(default_factory=list)

    def starts_of(self, arm: str) -> Sequence[Start]:
        """Return the starts of an arm, in the order in which they ran."""
        return [start for start in self.starts if start.arm == arm]


def write(result: Result, path: Path) -> None:
    """Write a result.

    Raises:
        BenchError: The file cannot be written.
    """
    try:
        path.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--json {path}: {error.strerror or error}") from None


def read(path: Path) -> Result:
    """Read what `write` wrote.

    Raises:
        BenchError: There is no such file, or it is something else.
    """
    try:
        return Result.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--from {path}: {getattr(error, 'strerror', None) or error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise BenchError(
            f"--from {path} is no result of this bench: {where}: {first['msg']}; expected what --json FILE wrote"
        ) from None
