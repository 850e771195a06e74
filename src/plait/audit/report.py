"""What a compiled program does: operations, collectives, bytes, memory, and the floors."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import numbers
from typing import Any

from plait.audit.hlo import BY_THE_COMPILER, COLLECTIVES, Instruction, Module

_PLURALS = {
    "gathers": "gather",
    "scatters": "scatter",
    "whiles": "while",
    "sorts": "sort",
    "copies": "copy",
    "transposes": "transpose",
    "custom_calls": "custom-call",
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction of the program, wherever it stands: also inside fusions and loops.

    Attributes:
      kind: XLA's opcode; an asynchronous pair is one operation of the plain kind.
      name: the instruction's name in the program's text.
      executions: how often it runs; a loop whose length is data counts as often as the caller of
        `compile_for` said, by default once.
      accessed_bytes: what one execution reads and writes; 0 inside a fusion, which counts whole.
      estimated_cycles: the TPU compiler's estimate for one execution; 0 where it gives none.
      source: "file:line" of the call that made it.
    """

    kind: str
    name: str
    executions: int
    accessed_bytes: int
    estimated_cycles: int
    source: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, its figures those of one device and one execution.

    Attributes:
      kind: "collective-permute", "all-gather", "reduce-scatter" and so on.
      name: the instruction's name in the program's text.
      bytes: the larger of what it takes and what it gives.
      traffic_bytes: what a device sends by the best known algorithm: all of a permute's operand,
        (n-1)/n of `bytes` for an all-gather, reduce-scatter or all-to-all, twice that for an
        all-reduce.
      participants: the devices of one group; of a permute, all that send or receive.
      stage: the serial stage of communication, from 1; 0 where nothing leaves a device. In a loop,
        that of the first turn.
      executions: how often it runs.
      source: "file:line" of the call that made it.
    """

    kind: str
    name: str
    bytes: int
    traffic_bytes: int
    participants: int
    stage: int
    executions: int
    source: str


class RequirementError(AssertionError):
    """A compiled program does not do what `Report.require` asks of it."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What one device of a compiled program does. All figures are static: nothing was run.

    Attributes:
      topology: the name of what it was compiled for.
      operations: every instruction that the program runs.
      collectives: every collective, in the order of the schedule.
      stages: serial stages of communication, those of every turn of a loop: the longest chain of
        collectives of which each needs what the last one brought.
      hbm_bytes: bytes read and written: the larger of the compiler's own count, where it gives one,
        and `counted_bytes`. The compiler counts twice what a permute sends, a loop as one turn,
        and a Pallas call as what the call claims.
      counted_bytes: the same by plait's reading of the instructions, each operand read and each
        result written once, also of a Pallas call; slices only for what they take, loops for
        every turn.
      argument_bytes, output_bytes, temp_bytes: memory held, by the compiler's plan.
      floor_bytes: reading the arguments and writing the outputs once.
      network_floor_bytes: what must leave a device, where whoever asked for the report knew it.
      estimated_cycles: the sum of the TPU compiler's estimates. It leaves out collectives, the
        inside of Pallas calls, launch gaps and overlap.
      clock_hz: cycles a second of the chip; None where there are no cycles.
      compile_seconds: how long this machine's compiler took.
    """

    topology: str
    operations: tuple[Operation, ...]
    collectives: tuple[Collective, ...]
    stages: int
    hbm_bytes: int
    counted_bytes: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    estimated_cycles: int
    clock_hz: float | None = None
    network_floor_bytes: int | None = None
    compile_seconds: float | None = None

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """How often each kind of operation stands in the program; collectives included."""
        return dict(collections.Counter(operation.kind for operation in self.operations))

    @functools.cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        """`counted_bytes` by kind of operation, the largest first."""
        sums: collections.Counter[str] = collections.Counter()
        for operation in self.operations:
            sums[operation.kind] += operation.accessed_bytes * operation.executions
        return {kind: count for kind, count in sums.most_common() if count}

    @property
    def traffic_bytes(self) -> int:
        """Bytes that a device sends in all."""
        return sum(c.traffic_bytes * c.executions for c in self.collectives)

    @property
    def floor_bytes(self) -> int:
        """Reading the arguments and writing the outputs once."""
        return self.argument_bytes + self.output_bytes

    @property
    def hbm_ratio(self) -> float:
        """`hbm_bytes` over the floor; NaN for a program without arguments and outputs."""
        return self.hbm_bytes / self.floor_bytes if self.floor_bytes else float("nan")

    @property
    def traffic_ratio(self) -> float | None:
        """`traffic_bytes` over the floor, where that is known and not 0."""
        return self.traffic_bytes / self.network_floor_bytes if self.network_floor_bytes else None

    @property
    def estimated_seconds(self) -> float | None:
        """`estimated_cycles` at the chip's clock: a weak estimate, never a measurement."""
        return self.estimated_cycles / self.clock_hz if self.clock_hz else None

    def require(
        self,
        *,
        gathers: int | None = None,
        scatters: int | None = None,
        whiles: int | None = None,
        sorts: int | None = None,
        copies: int | None = None,
        transposes: int | None = None,
        custom_calls: int | None = None,
        collectives: int | None = None,
        stages: int | None = None,
        temp_bytes_at_most: int | None = None,
        hbm_bytes_at_most: int | None = None,
        hbm_ratio_at_most: float | None = None,
        traffic_bytes_at_most: int | None = None,
    ) -> Report:
        """Check the program against what it should be, for use in a test suite.

        Counts are exact; bytes and ratios are bounds. What is None is not looked at.

        Returns:
          The report itself.

        Raises:
          RequirementError: an AssertionError that lists every requirement that does not hold with
            the instructions that break it and the lines of code that made them.
          TypeError: a requirement that is no number, or a count that is no integer.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        for name, value in given.items():
            _check_number(name, value)
        failures = []
        for plural, kind in _PLURALS.items():
            found = [o for o in self.operations if o.kind == kind]
            failures += _miscount(plural, len(found), given[plural], found)
        failures += _miscount("collectives", len(self.collectives), collectives, self.collectives)
        failures += _miscount("stages", self.stages, stages, self.collectives)
        moving = [o for o in self.operations if o.accessed_bytes and o.executions]
        heavy = sorted(moving, key=lambda o: -o.accessed_bytes * o.executions)
        for name, figure, bound, culprits in (
            ("temp_bytes", self.temp_bytes, temp_bytes_at_most, heavy[:5]),
            ("hbm_bytes", self.hbm_bytes, hbm_bytes_at_most, heavy[:5]),
            ("hbm_ratio", self.hbm_ratio, hbm_ratio_at_most, heavy[:5]),
            ("traffic_bytes", self.traffic_bytes, traffic_bytes_at_most, self.collectives),
        ):
            if bound is not None and not figure <= bound:
                shown, limit = _apart(figure, bound)
                failures.append(f"{name} is {shown}; at most {limit} is asked" + _list(culprits))
        if failures:
            raise RequirementError(f"compiled for {self.topology}:\n" + "\n".join(failures))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, for JSON; the operations as counts.

        What is not known, and the ratio to a floor of nothing, is None: JSON has no NaN.
        """
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["operations"] = self.counts
        plain["collectives"] = [dataclasses.asdict(c) for c in self.collectives]
        for name in ("bytes_by_kind", "traffic_bytes", "floor_bytes", "estimated_seconds"):
            plain[name] = getattr(self, name)
        plain["hbm_ratio"] = self.hbm_ratio if self.floor_bytes else None
        plain["traffic_ratio"] = self.traffic_ratio
        return plain


def _miscount(name: str, found: int, wanted: int | None, culprits: Any) -> list[str]:
    if wanted is None or found == wanted:
        return []
    return [f"{name} is {found}; {wanted} is asked" + _list(culprits)]


def _check_number(name: str, value: Any) -> None:
    """TypeError unless it is None, an integer, or for a bound any number."""
    bound = name.endswith("_at_most")
    is_number = isinstance(value, numbers.Real) and value == value
    if value is None or (is_number and (bound or isinstance(value, numbers.Integral))):
        return
    kind = "a number" if bound else "an integer"
    text = isinstance(value, str) and value.strip().isdecimal()
    works = int(value) if text or (is_number and abs(value) < math.inf) else 0
    raise TypeError(f"{name} is required to be {value!r}; it needs {kind}, such as {works}")


def _apart(figure: float, bound: float) -> tuple[str, str]:
    """Two different numbers as text, with as many digits as tell them apart, at least three."""
    for digits in range(3, 18):
        shown, limit = (_digits(x, digits) for x in (figure, bound))
        if shown != limit:
            break
    return shown, limit


def _digits(x: float, digits: int) -> str:
    return f"{int(x):,}" if x % 1 == 0 else f"{x:.{digits}g}"


def _list(culprits: Any) -> str:
    lines = []
    for culprit in culprits:
        by = culprit.source if culprit.source == BY_THE_COMPILER else f"made at {culprit.source}"
        lines.append(f"\n  {culprit.kind} {culprit.name}, {by}")
    more = [f"\n  and {len(lines) - 8} more"] if len(lines) > 8 else []
    return "".join(lines[:8] + more)


def _traffic(kind: str, carried: int, participants: int) -> int:
    share = (participants - 1) / participants
    if kind == "collective-permute":
        return carried
    return int(carried * share * (2 if kind == "all-reduce" else 1))


def _collective(instruction: Instruction, stage: int, executions: int) -> Collective:
    result = instruction.result_bytes
    carried = max(instruction.operand_bytes, result)
    sent = _traffic(instruction.kind, carried, instruction.participants)
    return Collective(
        kind=instruction.kind,
        name=instruction.name,
        bytes=carried,
        traffic_bytes=sent if stage else 0,
        participants=instruction.participants,
        stage=stage,
        executions=executions,
        source=instruction.source,
    )


def read_module(
    module: Module,
    *,
    topology: str,
    memory: Any = None,
    compiler_bytes: float | None = None,
    clock_hz: float | None = None,
    network_floor_bytes: int | None = None,
    compile_seconds: float | None = None,
) -> Report:
    """The report of a module, with what only the compiler can say given beside it.

    `memory` is what `memory_analysis()` of a compiled function gives.
    """
    stages, last_stage = module.stages
    operations, collectives = [], []
    counted = cycles = 0
    for execution in module.executions():
        instruction, count = execution.instruction, execution.count
        if instruction.is_second_half:
            continue
        accessed = 0 if execution.fused else instruction.accessed_bytes
        counted += accessed * count
        cycles += instruction.estimated_cycles * count
        if instruction.opcode == "async-start":
            continue  # the operation that it starts stands in its computation
        operations.append(
            Operation(
                kind=instruction.kind,
                name=instruction.name,
                executions=count,
                accessed_bytes=accessed,
                estimated_cycles=instruction.estimated_cycles,
                source=instruction.source,
            )
        )
        if instruction.kind in COLLECTIVES:
            collectives.append(_collective(instruction, stages.get(instruction, 0), count))
    return Report(
        topology=topology,
        operations=tuple(operations),
        collectives=tuple(collectives),
        stages=last_stage,
        hbm_bytes=max(counted, int(compiler_bytes or 0)),
        counted_bytes=counted,
        argument_bytes=memory.argument_size_in_bytes if memory else 0,
        output_bytes=memory.output_size_in_bytes if memory else 0,
        temp_bytes=memory.temp_size_in_bytes if memory else 0,
        estimated_cycles=cycles,
        clock_hz=clock_hz if cycles else None,
        network_floor_bytes=network_floor_bytes,
        compile_seconds=compile_seconds,
    )
