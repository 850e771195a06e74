# ruff: noqa: E501
"""Programs written by hand, and two that a compiler wrote, against what was counted by hand."""

import dataclasses
import gzip
import importlib
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from errors import refused
from plait import audit
from plait.audit import RequirementError
from plait.audit.hlo import Module
from plait.audit.report import read_module

pytest.importorskip("google.protobuf")

RECORDED = sorted((pathlib.Path(__file__).parent / "recorded").glob("*.hlo.pb.gz"))


def parser_of_xla():
    """XLA's own parser of program texts, which jaxlib has under another name in each release."""
    for name in ("jaxlib._hlo", "jaxlib._jax"):
        if importlib.util.find_spec(name):
            module = importlib.import_module(name)
            if hasattr(module, "hlo_module_from_text"):
                return module.hlo_module_from_text
    raise AssertionError("this jaxlib has no parser of program texts")


def module(text):
    return Module(parser_of_xla()(text).as_serialized_hlo_module_proto())


def report(text):
    return read_module(module(text), topology="by hand")


TWO_PERMUTES = """
HloModule two, num_partitions=4, entry_computation_layout={(bf16[8,128])->bf16[8,128]}

ENTRY main {
  x = bf16[8,128] parameter(0)
  low = bf16[4,128] slice(x), slice={[0:4], [0:128]}
  high = bf16[4,128] slice(x), slice={[4:8], [0:128]}
  first = (bf16[4,128], bf16[4,128], u32[], u32[]) collective-permute-start(low), source_target_pairs={{0,0},{1,3},{2,1},{3,2}}
  second = (bf16[4,128], bf16[4,128], u32[], u32[]) collective-permute-start(high), source_target_pairs={{0,3},{3,0}}
  one = bf16[4,128] collective-permute-done(first)
  two = bf16[4,128] collective-permute-done(second)
  ROOT out = bf16[8,128] concatenate(one, two), dimensions={0}
}
"""


def test_concurrent_permutes_stand_in_one_stage():
    found = report(TWO_PERMUTES)
    assert [
        (c.kind, c.bytes, c.traffic_bytes, c.participants, c.stage) for c in found.collectives
    ] == [
        ("collective-permute", 1024, 1024, 4, 1),
        ("collective-permute", 1024, 1024, 2, 1),
    ]
    assert found.stages == 1
    assert found.traffic_bytes == 2048
    # Slices 2 x 1024 read and written, permutes 2 x 1024, and the concatenation 2048: each twice.
    assert found.counted_bytes == 2 * (2048 + 2048 + 2048)
    assert found.counts["collective-permute"] == 2
    assert "collective-permute-done" not in found.counts


def test_a_permute_that_needs_another_stands_in_the_next_stage():
    chained = TWO_PERMUTES.replace(
        "collective-permute-start(high)", "collective-permute-start(one)"
    )
    # The second starts with what the first one brought, so that it has to stand behind it.
    lines = chained.splitlines()
    done = next(i for i, line in enumerate(lines) if " one = " in line)
    start = next(i for i, line in enumerate(lines) if " second = " in line)
    lines.insert(start, lines.pop(done))
    found = report("\n".join(lines))
    assert [c.stage for c in found.collectives] == [1, 2]
    assert found.stages == 2


def test_a_permute_of_every_device_to_itself_sends_nothing():
    text = TWO_PERMUTES.replace("{{0,3},{3,0}}", "{{0,0},{1,1},{2,2},{3,3}}")
    found = report(text)
    assert [(c.traffic_bytes, c.stage) for c in found.collectives] == [(1024, 1), (0, 0)]


LOOP = """
HloModule loop, num_partitions=2

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

body {
  state = (s32[], f32[16]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  x = f32[16] get-tuple-element(state), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one)
  summed = f32[16] all-reduce(x), replica_groups={{0,1}}, to_apply=add
  moved = f32[16] collective-permute(summed), source_target_pairs={{0,1},{1,0}}
  ROOT out = (s32[], f32[16]) tuple(next, moved)
}

test {
  state = (s32[], f32[16]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  last = s32[] constant(7)
  ROOT more = pred[] compare(i, last), direction=LT
}

ENTRY main {
  x = f32[16] parameter(0)
  start = s32[] constant(2)
  state = (s32[], f32[16]) tuple(start, x)
  loop = (s32[], f32[16]) while(state), condition=test, body=body
  y = f32[16] get-tuple-element(loop), index=1
  ROOT gathered = f32[32] all-gather(y), replica_groups={{0,1}}, dimensions={0}
}
"""


def test_a_loop_counts_every_turn():
    found = report(LOOP)
    assert [(c.kind, c.bytes, c.stage, c.executions) for c in found.collectives] == [
        ("all-reduce", 64, 1, 5),
        ("collective-permute", 64, 2, 5),
        ("all-gather", 128, 11, 1),
    ]
    assert found.stages == 11
    # An all-reduce sends its 64 bytes there and back, half of them; a permute all; a gather half.
    assert [c.traffic_bytes for c in found.collectives] == [64, 64, 64]
    assert found.traffic_bytes == 5 * (64 + 64) + 64
    # A turn: add 4+4+4, all-reduce 64+64, permute 64+64, compare 4+4+1. The gather 64+128.
    assert found.counted_bytes == 5 * (12 + 128 + 128 + 9) + 192
    assert found.counts["while"] == 1
    assert found.counts["add"] == 1  # the sum of the all-reduce is no operation of its own


def test_the_compiler_may_say_how_often_a_loop_runs():
    config = """, backend_config={"known_trip_count":{"n":"3"}}"""
    found = report(LOOP.replace("body=body", "body=body" + config))
    assert [c.executions for c in found.collectives] == [3, 3, 1]


def test_copies_do_not_hide_the_counter_of_a_loop():
    counted = LOOP.replace(
        "next = s32[] add(i, one)", "j = s32[] copy(i)\n  next = s32[] add(j, one)"
    )
    assert counted != LOOP
    assert [c.executions for c in report(counted).collectives] == [5, 5, 1]


@pytest.mark.parametrize(
    ("kind", "first", "last", "turns"),
    [
        ("u8", 2, 200, 198),
        ("s8", -100, 27, 127),
        ("u16", 0, 40000, 40000),
        ("s16", -300, -295, 5),
        ("u32", 2, 7, 5),
        ("s64", -2, 7, 9),
        ("u64", 2, 7, 5),
        ("s4", -8, 7, 15),
        ("u4", 2, 15, 13),
        ("u2", 1, 3, 2),
    ],
)
def test_a_counter_may_have_any_width(kind, first, last, turns):
    text = LOOP.replace("s32", kind).replace("constant(7)", f"constant({last})")
    found = report(text.replace("constant(2)", f"constant({first})"))
    assert [c.executions for c in found.collectives] == [turns, turns, 1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=NE"),
        ("one = s32[] constant(1)", "one = s32[] constant(2)"),
        ("next = s32[] add(i, one)", "next = s32[] multiply(i, one)"),
    ],
)
def test_a_loop_of_unknown_length_counts_once(old, new):
    found = report(LOOP.replace(old, new))
    assert [c.executions for c in found.collectives] == [1, 1, 1]
    assert found.stages == 3


def test_a_loop_whose_length_is_data_counts_as_often_as_is_said():
    text = LOOP.replace("direction=LT", "direction=NE")
    text = parser_of_xla()(text).as_serialized_hlo_module_proto()
    found = read_module(Module(text, unknown_turns=9), topology="by hand")
    assert [c.executions for c in found.collectives] == [9, 9, 1]


NOTES = """
HloModule notes

ENTRY main {
  x = f32[64] parameter(0)
  y = f32[64] custom-call(x), custom_call_target="theirs", backend_config={notes}
  ROOT z = f32[64] add(y, y)
}
"""


@pytest.mark.parametrize("notes", ["{uplo = 76 : ui8}", '{"window_config": {', "{"])
def test_what_a_custom_call_is_told_need_not_be_json(notes):
    found = report(NOTES.replace("{notes}", json.dumps(notes)))
    assert found.counted_bytes == 512 + 768
    assert found.estimated_cycles == 0


def test_a_custom_call_may_have_an_estimate():
    notes = json.dumps({"window_config": {"estimated_cycles": "450"}})
    assert report(NOTES.replace("{notes}", json.dumps(notes))).estimated_cycles == 450


def test_notes_of_the_compiler_that_are_broken_are_not_passed_over():
    text = NOTES.replace(', custom_call_target="theirs"', "").replace("custom-call", "negate")
    with pytest.raises(json.JSONDecodeError):
        report(text.replace("{notes}", json.dumps('{"window_config": {')))


@pytest.mark.parametrize("fn", [lambda x: jax.lax.top_k(x, 3), jnp.linalg.cholesky])
def test_calls_of_libraries_are_read(fn):
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert audit.compile_for("cpu", fn, x).counts["custom-call"] == 1


FUSIONS = """
HloModule fusions

pick {
  whole = f32[1024,4] parameter(0)
  rows = s32[8,1] parameter(1)
  at = s32[] parameter(2)
  zero = s32[] constant(0)
  part = f32[16,4] dynamic-slice(whole, at, zero), dynamic_slice_sizes={16,4}
  few = f32[8,4] gather(whole, rows), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,4}
  ROOT both = (f32[16,4], f32[8,4]) tuple(part, few)
}

place {
  whole = f32[1024,4] parameter(0)
  part = f32[16,4] parameter(1)
  at = s32[] parameter(2)
  zero = s32[] constant(0)
  twice = f32[16,4] add(part, part)
  ROOT placed = f32[1024,4] dynamic-update-slice(whole, twice, at, zero)
}

ENTRY main {
  whole = f32[1024,4] parameter(0)
  rows = s32[8,1] parameter(1)
  at = s32[] parameter(2)
  picked = (f32[16,4], f32[8,4]) fusion(whole, rows, at), kind=kLoop, calls=pick
  part = f32[16,4] get-tuple-element(picked), index=0
  ROOT placed = f32[1024,4] fusion(whole, part, at), kind=kLoop, calls=place
}
"""


def test_a_fusion_reads_of_an_operand_what_it_slices_and_writes_what_it_updates():
    found = report(FUSIONS)
    picked = 2 * (256 + 128) + 32 + 4  # the slices read and written, the rows and the place read
    placed = 256 + 256 + 4  # the part read, the same part of the whole written, the place read
    assert found.counted_bytes == picked + placed
    assert found.counts["gather"] == found.counts["dynamic-slice"] == 1
    assert found.counts["fusion"] == 2


def test_a_buffer_that_is_set_aside_moves_nothing():
    text = """
HloModule aside

ENTRY main {
  ROOT buffer = f32[64] custom-call(), custom_call_target="AllocateBuffer"
}
"""
    assert report(text).counted_bytes == 0
    assert report(text.replace("AllocateBuffer", "Other")).counted_bytes == 256


def test_a_fusion_in_a_fusion_reads_what_it_slices():
    """An outer fusion that hands its operands on to `pick`, as the TPU compiler nests them."""
    outer = """
outer {
  whole = f32[1024,4] parameter(0)
  rows = s32[8,1] parameter(1)
  at = s32[] parameter(2)
  ROOT both = (f32[16,4], f32[8,4]) fusion(whole, rows, at), kind=kLoop, calls=pick
}

place {"""
    nested = FUSIONS.replace("\nplace {", outer, 1).replace(
        "calls=pick\n  part", "calls=outer\n  part"
    )
    assert nested.count("calls=outer") == 1
    assert report(nested).counted_bytes == report(FUSIONS).counted_bytes


PRODUCT = """
HloModule product

handed {
  a = bf16[64,32] parameter(0)
  ROOT b = bf16[64,32] bitcast(a)
}

handed_again {
  a = bf16[32,16] parameter(0)
  ROOT b = bf16[32,16] bitcast(a)
}

twice_handed {
  a = bf16[32,16] parameter(0)
  ROOT b = bf16[32,16] fusion(a), kind=kLoop, calls=handed_again
}

product {
  x = bf16[64,32] parameter(0)
  w = bf16[32,16] parameter(1)
  left = bf16[64,32] fusion(x), kind=kLoop, calls=handed
  right = bf16[32,16] fusion(w), kind=kLoop, calls=twice_handed
  ROOT y = bf16[64,16] dot(left, right), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY main {
  x = bf16[64,32] parameter(0)
  w = bf16[32,16] parameter(1)
  ROOT y = bf16[64,16] fusion(x, w), kind=kOutput, calls=product
}
"""


def test_what_a_fusion_in_a_fusion_only_hands_on_is_read_by_the_outer_one():
    """As the TPU compiler gives operands to a matmul: x is 4096 bytes, w 1024, y 2048."""
    assert report(PRODUCT).counted_bytes == 4096 + 1024 + 2048


def test_a_slice_of_what_is_handed_on_reads_what_it_takes():
    text = """
HloModule rows

handed {
  a = f32[64,32] parameter(0)
  ROOT b = f32[64,32] bitcast(a)
}

rows {
  x = f32[64,32] parameter(0)
  same = f32[64,32] fusion(x), kind=kLoop, calls=handed
  ROOT y = f32[4,32] slice(same), slice={[0:4], [0:32]}
}

ENTRY main {
  x = f32[64,32] parameter(0)
  ROOT y = f32[4,32] fusion(x), kind=kLoop, calls=rows
}
"""
    assert report(text).counted_bytes == 2 * 512
    assert (
        report(
            text.replace("kLoop, calls=rows", "kLoop, calls=handed").replace(
                "ROOT y = f32[4,32] fusion", "ROOT y = f32[64,32] fusion"
            )
        ).counted_bytes
        == 2 * 8192
    )


OTHERS = """
HloModule others, num_partitions=8

sum {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = s32[] add(a, b)
}
less {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = pred[] compare(a, b), direction=LT
}

left {
  x = s32[64] parameter(0)
  ROOT y = s32[64] sort(x), dimensions={0}, to_apply=less
}

right {
  x = s32[64] parameter(0)
  ROOT y = s32[64] copy(x)
}

ENTRY main {
  p = pred[] parameter(0)
  x = s32[64] parameter(1)
  chosen = s32[64] conditional(p, x, x), true_computation=left, false_computation=right
  square = s32[8,8] bitcast(chosen)
  turned = s32[8,8] transpose(square), dimensions={1,0}
  flat = s32[64] bitcast(turned)
  begun = (s32[64], s32[64], u32[]) copy-start(flat)
  ended = s32[64] copy-done(begun)
  called = s32[64] custom-call(ended), custom_call_target="theirs"
  dealt = s32[64] all-to-all(called), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT kept = s32[16] reduce-scatter(dealt), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=sum
}
"""


def test_every_kind_is_counted_once_wherever_it_stands():
    found = report(OTHERS)
    wanted = {"sort": 1, "copy": 2, "transpose": 1, "custom-call": 1, "conditional": 1}
    assert {kind: found.counts[kind] for kind in wanted} == wanted
    shown = [(c.kind, c.bytes, c.traffic_bytes, c.participants, c.stage) for c in found.collectives]
    assert shown == [("all-to-all", 256, 192, 4, 1), ("reduce-scatter", 256, 192, 4, 2)]
    # sort, copy, transpose, copy-start, custom-call and all-to-all each move 256 bytes twice.
    assert found.counted_bytes == 6 * 512 + 256 + 64


OFFLOADED = """
HloModule offloaded

inner {
  x = f32[64,4] parameter(0)
  rows = s32[8,1] parameter(1)
  ROOT few = f32[8,4] gather(x, rows), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,4}
}

outer {
  x = f32[64,4] parameter(0)
  rows = s32[8,1] parameter(1)
  ROOT few = f32[8,4] custom-call(x, rows), custom_call_target="core", called_computations={inner}
}

ENTRY main {
  x = f32[64,4] parameter(0)
  rows = s32[8,1] parameter(1)
  begun = ((f32[64,4], s32[8,1]), f32[8,4], u32[]) async-start(x, rows), calls=outer
  ROOT few = f32[8,4] async-done(begun)
}
"""


def test_a_gather_that_is_handed_to_another_core_is_a_gather():
    found = report(OFFLOADED)
    assert found.counts["gather"] == found.counts["custom-call"] == 1
    assert "async" not in found.counts
    # The custom call counts what it takes and gives, 1024 + 32 + 128, and its inside nothing.
    assert found.counted_bytes == 1184


@pytest.mark.parametrize(("written", "read"), [("450", 450), (str(2**63 - 1), 0)])
def test_the_largest_integer_is_no_estimate(written, read):
    config = json.dumps({"window_config": {"estimated_cycles": written}})
    text = OFFLOADED.replace("slice_sizes={1,4}", "slice_sizes={1,4}, backend_config=" + config)
    assert report(text).estimated_cycles == read


def test_requirements_that_hold_give_the_report():
    found = report(OTHERS)
    asked = found.require(
        gathers=0,
        whiles=0,
        sorts=1,
        copies=2,
        transposes=1,
        custom_calls=1,
        collectives=2,
        stages=2,
    )
    assert asked is found


def test_requirements_that_fail_name_the_instructions():
    with pytest.raises(RequirementError) as caught:
        report(OTHERS).require(sorts=0, stages=1, collectives=2, traffic_bytes_at_most=300)
    message = str(caught.value)
    assert "sorts is 1; 0 is asked\n  sort y" in message
    assert "stages is 2; 1 is asked" in message
    assert "traffic_bytes is 384; at most 300 is asked" in message
    assert "reduce-scatter kept" in message
    assert "collectives is" not in message


def test_a_bound_that_is_missed_by_little_is_told_apart():
    found = dataclasses.replace(report(OTHERS), hbm_bytes=1_000_001, argument_bytes=1_000_000)
    with pytest.raises(RequirementError) as caught:
        found.require(hbm_ratio_at_most=1, hbm_bytes_at_most=1e6, temp_bytes_at_most=-0.5)
    message = str(caught.value)
    assert "hbm_ratio is 1.000001; at most 1 is asked" in message
    assert "hbm_bytes is 1,000,001; at most 1,000,000 is asked" in message
    assert "temp_bytes is 0; at most -0.5 is asked" in message
    nothing = dataclasses.replace(found, argument_bytes=0)
    with pytest.raises(RequirementError, match="hbm_ratio is nan; at most 1 is asked"):
        nothing.require(hbm_ratio_at_most=1.0)


def test_what_moves_no_bytes_is_not_to_blame_for_them():
    with pytest.raises(RequirementError) as caught:
        report(FUSIONS).require(hbm_bytes_at_most=1)
    assert re.findall(r"^  .*", str(caught.value), flags=re.MULTILINE) == [
        "  fusion picked, made by the compiler",
        "  fusion placed.1, made by the compiler",
    ]


@pytest.mark.parametrize(
    ("requirement", "value", "works"),
    [
        ("gathers", "0", "an integer, such as 0"),
        ("stages", 2.5, "an integer, such as 2"),
        ("copies", [], "an integer, such as 0"),
        ("hbm_ratio_at_most", "4", "a number, such as 4"),
        ("hbm_ratio_at_most", float("nan"), "a number, such as 0"),
    ],
)
def test_a_requirement_is_a_number(requirement, value, works):
    words = (f"{requirement} is required to be {value!r}", works)
    refused(lambda: report(OTHERS).require(**{requirement: value}), *words, error=TypeError)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_a_recorded_tpu_program_reads_as_by_hand(path):
    """Three turns of reorder and restore by two ranks' permutes each, and a sum over the mesh.

    Compiled for v5p:2x2x2 from bf16[2,64,128] over {"data": 2, "context": 4}: a shard is
    bf16[1,16,128], 4096 bytes, of which a permute carries half. Lines 9 and 12 of step.py make
    the moves and the sum.
    """
    text = gzip.decompress(path.read_bytes())
    program = Module(text)
    found = read_module(program, topology="v5p:2x2x2")
    permute = ("collective-permute", 2048, 8, 3)
    shown = [(c.kind, c.bytes, c.participants, c.executions) for c in found.collectives]
    assert shown == [permute] * 4 + [("all-reduce", 2, 8, 1)]
    made = {i.kind: i.frames for i in program.stages[0]}
    assert ("step.py", 9) in made["collective-permute"]
    assert made["all-reduce"][0] == ("step.py", 12)
    assert [c.stage for c in found.collectives] == [1, 1, 2, 2, 1]
    assert found.stages == 6
    assert found.counts["while"] == 1
    assert "gather" not in found.counts
    cycles = [int(n) for n in re.findall(rb'"estimated_cycles":"(\d+)"', text)]
    assert sum(cycles) < found.estimated_cycles < 3 * sum(cycles)


def test_the_source_of_an_instruction_is_the_users_line():
    jax = pytest.importorskip("jax")
    from plait import Zigzag, reorder

    def step(x):
        return reorder(x, Zigzag(2), axis=0) + jax.numpy.take(x, jax.numpy.array([1, 0, 3, 2]))

    here = step.__code__.co_firstlineno + 1
    found = audit.compile_for("cpu", step, jax.ShapeDtypeStruct((4,), "float32"))
    made = {o.source for o in found.operations if o.kind in ("gather", "concatenate", "slice")}
    assert made == {f"{__file__}:{here}"}


def product(target, fn):
    a = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    found = audit.compile_for(target, fn, a, a)
    return [o for o in found.operations if o.kind == "fusion" and o.accessed_bytes > 1e6]


def test_a_matmul_on_a_tpu_reads_both_operands():
    pytest.importorskip("libtpu")
    matrix = 2 * 4096 * 4096
    (found,) = product("v5p:2x2x1", lambda a, b: a @ b)
    assert found.accessed_bytes == 3 * matrix == 100663296
    for unroll in (1, 2):
        found = product(
            "v5p:2x2x1",
            lambda a, b, unroll=unroll: jax.lax.scan(
                lambda c, _: (jnp.tanh(c @ b), None), a, length=10, unroll=unroll
            )[0],
        )
        assert {o.accessed_bytes for o in found} == {3 * matrix}
        assert sum(o.executions for o in found) == 10


def test_a_narrow_counter_of_a_tpu_loop_is_counted():
    pytest.importorskip("libtpu")
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def fn(x):
        return jax.lax.fori_loop(jnp.uint8(0), jnp.uint8(5), lambda i, x: jnp.sin(x[::-1]), x)

    found = audit.compile_for("v5p:2x2x1", fn, x)
    assert found.counts["while"] == 1
    assert max(o.executions for o in found.operations) == 5
