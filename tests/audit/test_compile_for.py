"""What a function is compiled with: static arguments, weak types, specs, meshes; and refusals."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from errors import refused
from plait.audit import compile_for, read_compiled, topology
from plait.audit.arguments import SpecError
from plait.audit.hlo import Module

pytest.importorskip("google.protobuf")

S = jax.ShapeDtypeStruct
X = S((8, 4), jnp.float32)  # 128 bytes


@pytest.mark.parametrize(
    ("scale", "output_bytes"),
    [
        (2.0, 64),
        (3, 64),
        (True, 64),
        (jnp.asarray(2.0), 64),
        (S((), jnp.float32, weak_type=True), 64),
        (np.float32(2), 128),
        (jnp.float32(2), 128),
        (S((), jnp.float32), 128),
    ],
)
def test_a_scalar_is_as_weak_as_in_a_call(scale, output_bytes):
    x = S((8, 4), jnp.bfloat16)
    assert compile_for("cpu", lambda a, s: a * s, x, scale).output_bytes == output_bytes
    over = {"mesh": {"a": 8}, "in_specs": P("a"), "out_specs": P("a")}
    if isinstance(scale, int | float):
        found = compile_for("cpu:8", lambda a, s: a * s, x, scale, **over)
        assert found.output_bytes == output_bytes // 8


def test_static_arguments_go_to_the_function_as_they_are():
    def part(x, rows, flag="all"):
        return x[:rows] if flag == "some" else x

    by_number = jax.jit(part, static_argnums=(1, 2))
    by_name = jax.jit(part, static_argnames=("rows", "flag"))
    for fn in (by_number, by_name):
        assert compile_for("cpu", fn, X, 2, "some").output_bytes == 32
        assert compile_for("cpu", fn, X, 2, "all").output_bytes == 128
        found = compile_for("cpu:8", fn, X, 2, "all", mesh={"a": 8}, in_specs=P("a"))
        assert found.argument_bytes == 16

    @functools.partial(jax.jit, static_argnums=0)
    def ones(shape, x):
        return jnp.ones(shape) * x

    assert compile_for("cpu", ones, (3, 5), 2.0).output_bytes == 60


@pytest.mark.parametrize("fn", [lambda x, m: x, jax.jit(lambda x, m: x)])
def test_what_is_no_array_and_not_static_is_refused(fn):
    words = ("argument 1 is 'half', a str", "functools.partial", "static_argnums")
    refused(lambda: compile_for("cpu", fn, X, "half"), *words, error=TypeError)
    words = ("'m' of argument 1 is 'half'", "functools.partial")
    refused(lambda: compile_for("cpu", fn, X, {"m": "half"}), *words, error=TypeError)


def test_a_jitted_function_is_traced_once_and_with_its_arguments_alone():
    seen = []

    @functools.partial(jax.jit, static_argnums=1)
    def fn(x, n):
        seen.append((x.shape, n))
        return x * n

    compile_for("cpu", fn, X, 2)
    assert seen == [((8, 4), 2)]


def test_a_shape_is_no_argument():
    struct = "jax.ShapeDtypeStruct((8, 4), dtype)"
    for fn in (lambda x: x, jax.jit(lambda x: x)):
        refused(lambda fn=fn: compile_for("cpu", fn, (8, 4)), "(8, 4)", struct, error=TypeError)
        within = functools.partial(compile_for, "cpu", fn, {"x": [8, 4]})
        refused(within, "'x' of argument 0", struct, error=TypeError)
    report = compile_for("cpu", lambda pair: pair[0] * pair[1], (X, 2))
    assert report.output_bytes == 128


def test_numbers_alone_are_compiled_for_the_topology():
    pytest.importorskip("libtpu")
    for fn, arguments in ((lambda s: s * 2, [2.0]), (lambda: jnp.ones(3), [])):
        report = compile_for("v5p:2x2x1", fn, *arguments)
        assert report.output_bytes == 512  # of a TPU's tile


TREE = {"b": [S((16,), jnp.float32), 2.0], "n": None, "w": X}


def total(tree):
    return tree["w"].sum() + tree["b"][0].sum() * tree["b"][1]


@pytest.mark.parametrize(
    ("specs", "argument_bytes"),
    [
        ((P(),), 128 + 64 + 4),
        (({"w": P("a"), "b": P(), "n": None},), 16 + 64 + 4),
        (({"w": P("a"), "b": [P("a"), None], "n": None},), 16 + 8 + 4),
        (P("a"), 16 + 8 + 4),
        ([None], 128 + 64 + 4),
    ],
)
def test_a_spec_may_be_a_prefix_of_an_argument(specs, argument_bytes):
    report = compile_for("cpu:8", total, TREE, mesh={"a": 8}, in_specs=specs)
    assert report.argument_bytes == argument_bytes


@pytest.mark.parametrize(
    ("specs", "words", "error"),
    [
        ("a", ["in_specs is 'a'", "PartitionSpec('a')"], TypeError),
        (("a",), ["argument 0 is 'a'", "PartitionSpec('a')"], TypeError),
        ({"x": P("a")}, ["in_specs is {'x'", "such as ({'x'"], TypeError),
        ((P("a"), P()), ["2 entries for 1 arguments"], ValueError),
        (({"x": P("a")},), ["argument 0", "not a prefix", "one PartitionSpec"], SpecError),
        (P("z"), ["names 'z'", "the mesh has 'a'"], SpecError),
        (P(None, None, "a"), ["shape (8, 4)", "P(None, None) works"], SpecError),
        (P(None, "a"), ["axis 1", "over 8 devices", "(8, 8) works"], SpecError),
    ],
)
def test_specs_that_do_not_fit_are_refused(specs, words, error):
    def go():
        compile_for("cpu:8", lambda x: x, X, mesh={"a": 8}, in_specs=specs)

    refused(go, *words, error=error)


def test_specs_of_results_that_do_not_fit_are_refused():
    def go(fn, specs, size=8):
        return compile_for("cpu:8", fn, X, mesh={"a": size}, out_specs=specs)

    twice = (P("a"), P())
    assert go(lambda x: (x, x), twice).output_bytes == 16 + 128 + 2 * 8  # and the tuple's pointers
    refused(lambda: go(lambda x: x, twice), "results", "not a prefix", "one PartitionSpec")
    refused(lambda: go(lambda x: x, P("a"), 3), "the result", "over 3 devices", "(9, 4) works")
    refused(lambda: go(lambda x: (x, x), P("a"), 3), "result '0'", "(9, 4) works")
    refused(lambda: go(lambda x: x, "a"), "is 'a'", "PartitionSpec('a')", error=TypeError)


@pytest.mark.parametrize(
    ("mesh", "words", "error"),
    [
        ({}, ["no axes", "{'context': 8}"], ValueError),
        ({"a": -2, "b": -2}, ["'a'", "size -2", "such as 1"], ValueError),
        ({"a": 0}, ["'a'", "size 0", "such as 1"], ValueError),
        ({"a": 2.5}, ["'a'", "size 2.5", "such as 2"], TypeError),
        ({"a": "8"}, ["'a'", "size '8'", "such as 8"], TypeError),
        ({"a": True}, ["'a'", "size True"], TypeError),
        ({3: 2}, ["named 3", "'3'"], TypeError),
        (8, ["mesh is 8", "{'context': 8}"], TypeError),
        ("a", ["mesh is 'a'", "{'context': 8}"], TypeError),
    ],
)
def test_a_mesh_that_is_none_is_refused(mesh, words, error):
    refused(lambda: compile_for("cpu:8", lambda x: x, X, mesh=mesh), *words, error=error)


@pytest.mark.parametrize(
    ("turns", "error", "nearest"),
    [(-1, ValueError, "at least 0"), (2.5, TypeError, "such as 2"), ("3", TypeError, "such as 1")],
)
def test_turns_are_a_count(turns, error, nearest):
    words = (f"unknown_turns is {turns!r}", nearest)
    refused(lambda: compile_for("cpu", lambda x: x, X, unknown_turns=turns), *words, error=error)
    refused(lambda: Module(b"", turns), *words, error=error)


def test_the_target_is_a_topology():
    for target in (None, jax.devices()[0]):
        words = (f"topology is {target!r}", "'v5p:4x4x8'")
        refused(lambda t=target: topology(t), *words, error=TypeError)
        refused(lambda t=target: compile_for(t, lambda x: x, X), *words, error=TypeError)


def test_what_is_read_is_compiled_and_for_the_topology():
    jitted = jax.jit(lambda x: x + 1)
    lowered = jitted.lower(X)
    compiled = lowered.compile()
    assert read_compiled(compiled, "local").output_bytes == 128
    refused(lambda: read_compiled(lowered, "cpu"), "Lowered", "call .compile()", error=TypeError)
    words = ("PjitFunction", "call .lower(...).compile()")
    refused(lambda: read_compiled(jitted, "cpu"), *words, error=TypeError)
    refused(lambda: read_compiled(print, "cpu"), "call jax.jit(f)", error=TypeError)
    refused(lambda: read_compiled(compiled, None), "topology is None", error=TypeError)
    sharded = jax.jit(lambda x: x + 1).lower(
        jax.device_put(np.ones(8), topology("cpu:8").devices[0])
    )
    assert read_compiled(sharded.compile(), "cpu:1").stages == 0


def test_a_program_for_other_devices_is_refused():
    over_eight = S((8,), jnp.float32, sharding=jax.NamedSharding(topology("cpu:8").mesh(), P()))
    compiled = jax.jit(lambda x: x + 1).lower(over_eight).compile()
    refused(lambda: read_compiled(compiled, "cpu:4"), "8 x cpu", "cpu:4 is 4 x cpu")
    pytest.importorskip("libtpu")
    refused(lambda: read_compiled(compiled, "v5p:2x2x2"), "8 x cpu", "8 x TPU v5")
    mesh = topology("cpu:2").mesh()
    refused(lambda: compile_for("v5p:2x2x1", lambda x: x, X, mesh=mesh), "2 x cpu", "4 x TPU v5")


def test_programs_for_devices_elsewhere_are_kept_out_of_the_cache():
    """The tests keep what they compile; a second TPU program would be read from there in vain."""
    pytest.importorskip("libtpu")
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            compile_for("v5p:2x2x1", lambda x: x @ x.T + 3, X)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == before
