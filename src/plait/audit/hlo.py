"""The instructions of a compiled program, with what each reads, writes and sends."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import os
from collections.abc import Collection, Iterator
from typing import Any

from plait.audit import proto

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

# Instructions that move nothing: names for values that exist already.
_FREE = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
_FREE_CALLS = {"AllocateBuffer", "AssumeGatherIndicesInBound"}  # the TPU compiler's notes to itself
_CALLERS = {"call", "conditional", "while", "async-start", "async-update", "async-done"}
# What counts whole what it reads and writes, whatever the computations inside do.
_WHOLES = {"custom-call", "fusion"}
_NO_ESTIMATE = 2**63 - 1  # what the TPU compiler writes for a gather that the SparseCores do
_SLICES = {"slice", "dynamic-slice", "gather"}

BY_THE_COMPILER = "made by the compiler"
"""The source of an instruction that no line of code asks for."""

_PLAIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _bits(element_type: str) -> int:
    if element_type == "pred":
        return 8
    digits = "".join(c if c.isdigit() else " " for c in element_type).split()
    return int(digits[0]) if digits else 0


def _element_type(shape: Any) -> str:
    kinds = proto.ELEMENT_TYPES
    return kinds[shape.element_type] if shape.element_type < len(kinds) else "invalid"


def _bytes_of(shape: Any) -> int:
    if shape.tuple_shapes:
        return sum(_bytes_of(part) for part in shape.tuple_shapes)
    return _bits(_element_type(shape)) * math.prod(shape.dimensions) // 8


@dataclasses.dataclass(eq=False)
class Instruction:
    """One instruction of a computation; its operands are instructions of the same computation."""

    module: Module = dataclasses.field(repr=False)
    computation: Computation = dataclasses.field(repr=False)
    message: Any = dataclasses.field(repr=False)
    operands: list[Instruction] = dataclasses.field(default_factory=list, repr=False)
    users: list[Instruction] = dataclasses.field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        return self.message.name

    @property
    def opcode(self) -> str:
        """XLA's opcode, such as "collective-permute-start"."""
        return self.message.opcode

    @property
    def kind(self) -> str:
        """The opcode without what an asynchronous form adds to it."""
        return self.opcode.removesuffix("-start").removesuffix("-done")

    @property
    def is_second_half(self) -> bool:
        """Whether this ends what another instruction began, and so counts nothing itself."""
        return self.opcode.endswith(("-done", "-update"))

    @property
    def called(self) -> list[Computation]:
        """The computations that it runs: not the scalar functions of reductions and sorts."""
        if self.is_second_half or self.opcode not in _CALLERS | _WHOLES:
            return []
        return [self.module.by_id[identity] for identity in self.message.called_computation_ids]

    @property
    def result_bytes(self) -> int:
        """Bytes of the value: of an asynchronous start, of the value that it ends with."""
        if self.opcode.endswith("-start"):
            done = [user for user in self.users if user.is_second_half]
            if done:
                return done[0].result_bytes
        return _bytes_of(self.message.shape)

    @property
    def operand_bytes(self) -> int:
        return sum(operand.result_bytes for operand in self.operands)

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        """The compiler's own notes on an instruction, where it writes them as JSON.

        Those of a custom call are its target's, in any form; what is no JSON there says nothing.
        """
        text = self.message.backend_config
        if text[:1] != b"{":
            return {}
        if self.opcode != "custom-call":
            return json.loads(text)
        try:
            return json.loads(text.decode(errors="replace"))
        except json.JSONDecodeError:
            return {}

    @property
    def estimated_cycles(self) -> int:
        """The TPU compiler's estimate for one execution; 0 where it gives none."""
        window = self.backend_config.get("window_config", {})
        cycles = int(window.get("estimated_cycles", 0))
        return 0 if cycles == _NO_ESTIMATE else cycles

    @functools.cached_property
    def trip_count(self) -> int | None:
        """How often a while loop runs, where the compiler says so or the loop counts up to it."""
        known = self.backend_config.get("known_trip_count", {}).get("n")
        return _counted_turns(self) if known is None else int(known)

    @property
    def participants(self) -> int:
        """Devices that take part in one instance of a collective."""
        message = self.message
        listed = message.collective_device_list
        if message.source_target_pairs:
            ends = {(pair.source, pair.target) for pair in message.source_target_pairs}
            return len({device for pair in ends for device in pair})
        for groups in (message.replica_groups, listed.replica_groups):
            if groups:
                return max(len(group.replica_ids) for group in groups)
        for iota in (message.iota_collective_device_list, listed.iota):
            if iota.devices_per_group:
                return iota.devices_per_group
        named = message.mesh_axes_replica_group_list
        if named.axes:
            sizes = [axis.size for axis in named.mesh.axes]
            return math.prod(axis.part.size or sizes[axis.index] for axis in named.axes)
        return 1

    @property
    def sends(self) -> bool:
        """Whether any byte of a collective leaves its device."""
        pairs = self.message.source_target_pairs
        if self.kind == "collective-permute":
            return any(pair.source != pair.target for pair in pairs)
        return self.participants > 1

    @property
    def accessed_bytes(self) -> int:
        """Bytes that one execution reads and writes, without those of the loops it calls."""
        if self.opcode in _FREE or self.is_second_half or self.opcode in _CALLERS:
            return 0
        if self.opcode == "custom-call" and self.message.custom_call_target in _FREE_CALLS:
            return 0
        if self.opcode == "fusion":
            return _fusion_bytes(self, self.called[0])
        if self.opcode in _SLICES:
            return 2 * self.result_bytes + sum(o.result_bytes for o in self.operands[1:])
        if self.opcode == "dynamic-update-slice":
            return 2 * self.operands[1].result_bytes
        if self.opcode == "scatter":
            return 2 * self.operands[-1].result_bytes + self.operands[1].result_bytes
        return self.operand_bytes + self.result_bytes

    @functools.cached_property
    def frames(self) -> list[tuple[str, int]]:
        """(file, line) of the Python calls that made it, innermost first."""
        metadata = self.message.metadata
        frames = self.module.frames(metadata.stack_frame_id)
        if not frames and metadata.source_file:
            frames = [(metadata.source_file, metadata.source_line)]
        return frames

    @property
    def source(self) -> str:
        """ "file:line" of the innermost call outside plait, or where plait has it all, in plait."""
        frames = self.frames
        for file, line in [f for f in frames if not f[0].startswith(_PLAIT)] or frames:
            return f"{file}:{line}"
        return BY_THE_COMPILER


def _behind(instruction: Instruction, kinds: Collection[str] = ("bitcast",)) -> Instruction:
    """The value that instructions of some kinds only hand on."""
    while instruction.kind in kinds:
        instruction = instruction.operands[0]
    return instruction


_behind_copies = functools.partial(_behind, kinds=("bitcast", "copy"))


def _integer(instruction: Instruction) -> int | None:
    """The value of a constant integer of any width, also behind a copy."""
    constant = _behind_copies(instruction)
    kind = _element_type(constant.message.shape)
    if constant.opcode != "constant" or kind[:1] not in "su" or not kind[1:].isdecimal():
        return None
    values = getattr(constant.message.literal, f"{kind}s")
    bits = _bits(kind)
    if bits >= 32:
        return values[0] if len(values) == 1 else None
    if constant.result_bytes > (bits + 7) // 8:
        return None  # an array
    value = int.from_bytes(values, "little") % 2**bits
    return value - 2**bits if kind[0] == "s" and value >= 2 ** (bits - 1) else value


def _counted_turns(loop: Instruction) -> int | None:
    """The turns of a loop that adds 1 to a counter as long as it is below a constant.

    That is what `jax.lax.scan` and `fori_loop` make; of any other loop the answer is None.
    """
    bodies = {c.root.opcode == "tuple": c for c in loop.called}
    (start,) = loop.operands
    if set(bodies) != {True, False} or start.opcode != "tuple":
        return None
    test, step = bodies[False].root, bodies[True].root
    if test.opcode != "compare" or test.message.comparison_direction != "LT":
        return None
    counter, bound = map(_behind_copies, test.operands)
    if counter.opcode != "get-tuple-element":
        return None
    index = counter.message.tuple_index
    last, first = _integer(bound), _integer(start.operands[index])
    added = _behind_copies(step.operands[index])
    if last is None or first is None or added.opcode != "add":
        return None
    terms = [_behind_copies(o) for o in added.operands]
    takes = [o for o in terms if o.opcode == "get-tuple-element"]
    steps = [_integer(o) for o in terms if o not in takes]
    counts_up = steps == [1] and [o.message.tuple_index for o in takes] == [index]
    return max(0, last - first) if counts_up else None


def _read_of(value: Instruction, callers: tuple[Instruction, ...] = ()) -> int:
    """Bytes that a fused computation reads of a value: a slice reads only what it takes.

    `callers` are the fusions, from the outermost, whose bodies the value stands in below the first.
    What a body hands on is read where its caller's result is, and all of it at the end.
    """
    read = 0
    if value is value.computation.root:
        read = _read_of(callers[-1], callers[:-1]) if callers else value.result_bytes
    for user in value.users:
        if user.opcode == "bitcast":
            read += _read_of(user, callers)
        elif user.opcode in _SLICES and user.operands[0] is value:
            read += user.result_bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] is value:
            pass  # updated in place
        elif user.opcode == "fusion":  # fusions nest, and a slice may stand in the inner one
            inner = [i for i in user.called[0].instructions if i.opcode == "parameter"]
            places = [n for n, operand in enumerate(user.operands) if operand is value]
            within = (*callers, user)
            read += sum(_read_of(i, within) for i in inner if i.message.parameter_number in places)
        else:
            return value.result_bytes
    return min(read, value.result_bytes)


def _fusion_bytes(fusion: Instruction, body: Computation) -> int:
    results = body.root.operands if body.root.opcode == "tuple" else [body.root]
    total = 0
    for result in map(_behind, results):
        is_update = result.opcode == "dynamic-update-slice"
        total += (result.operands[1] if is_update else result).result_bytes
    parameters = [i for i in body.instructions if i.opcode == "parameter"]
    return total + sum(_read_of(parameter) for parameter in parameters)


@dataclasses.dataclass(eq=False)
class Computation:
    """A list of instructions in the order of the schedule, operands first."""

    name: str
    instructions: list[Instruction] = dataclasses.field(default_factory=list, repr=False)
    root: Instruction = dataclasses.field(init=False, repr=False)


def _turns(instruction: Instruction) -> int:
    known = instruction.trip_count if instruction.opcode == "while" else 1
    return instruction.module.unknown_turns if known is None else known


def check_turns(unknown_turns: Any) -> None:
    """An error unless a loop can be counted so often."""
    try:
        turns = operator.index(unknown_turns)
    except TypeError:
        number = isinstance(unknown_turns, float) and math.isfinite(unknown_turns)
        nearest = max(0, round(unknown_turns)) if number else 1
        raise TypeError(
            f"unknown_turns is {unknown_turns!r}; it needs to be an integer, such as {nearest}"
        ) from None
    if turns < 0:
        raise ValueError(f"unknown_turns is {turns}; it needs to be at least 0")


@dataclasses.dataclass(eq=False)
class Execution:
    """An instruction in the place where it runs, and how often that place runs."""

    instruction: Instruction
    count: int
    fused: bool
    """Whether it stands inside a fusion or a custom call, whose bytes are counted for the whole."""


class Module:
    """A compiled program for one device.

    Args:
      serialized: a serialized `HloModuleProto`, as `hlo_modules()` of a compiled function's
        `runtime_executable()` gives it.
      unknown_turns: how often a loop is taken to run whose length is data.
    """

    def __init__(self, serialized: bytes, unknown_turns: int = 1):
        check_turns(unknown_turns)
        message = proto.parse(serialized)
        self.unknown_turns = unknown_turns
        self.name: str = message.name
        self._index = message.stack_frame_index
        self.by_id: dict[int, Computation] = {}
        for part in message.computations:
            computation = Computation(part.name)
            made = {m.id: Instruction(self, computation, m) for m in part.instructions}
            for instruction in made.values():
                for operand in instruction.message.operand_ids:
                    instruction.operands.append(made[operand])
                    made[operand].users.append(instruction)
            computation.instructions = list(made.values())
            computation.root = made[part.root_id]
            self.by_id[part.id] = computation
        self.entry = self.by_id[message.entry_computation_id]

    def frames(self, frame: int) -> list[tuple[str, int]]:
        """(file, line) from a stack frame outwards; frames are numbered from 1."""
        index, found = self._index, []
        while 0 < frame <= len(index.stack_frames):
            entry = index.stack_frames[frame - 1]
            location = index.file_locations[entry.location - 1]
            found.append((index.file_names[location.file - 1], location.line))
            if entry.parent == frame:
                break
            frame = entry.parent
        return found

    def executions(self) -> Iterator[Execution]:
        """Every instruction that runs, those of fusions, loops and branches included.

        A loop of unknown length has `unknown_turns`; of a conditional, every branch counts.
        """
        yield from self._executions(self.entry, 1, fused=False)

    def _executions(self, computation: Computation, count: int, fused: bool) -> Iterator[Execution]:
        for instruction in computation.instructions:
            yield Execution(instruction, count, fused)
            turns = _turns(instruction)
            for called in instruction.called:
                inside = fused or instruction.opcode in _WHOLES
                yield from self._executions(called, count * turns, inside)

    @functools.cached_property
    def stages(self) -> tuple[dict[Instruction, int], int]:
        """For each collective, the serial stage that it stands in, from 1; and how many there are.

        A collective stands one stage after the latest of those whose results it needs; those of
        one stage may be under way together. A loop has the stages of all of its turns, of which
        its collectives are given their first.
        """
        found: dict[Instruction, int] = {}
        return found, _stage(self.entry, 0, found)


def _stage(computation: Computation, before: int, found: dict[Instruction, int]) -> int:
    """The latest stage in a computation, given the latest that its parameters have behind them."""
    behind: dict[Instruction, int] = {}
    for instruction in computation.instructions:
        stage = max((behind[operand] for operand in instruction.operands), default=before)
        if instruction.is_second_half:
            pass
        elif instruction.kind in COLLECTIVES and instruction.sends:
            stage += 1
            found[instruction] = stage
        elif instruction.called:
            ends = [_stage(called, stage, found) for called in instruction.called]
            stage += (max(ends) - stage) * _turns(instruction)
        behind[instruction] = stage
    return max(behind.values())
