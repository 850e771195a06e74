import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import plait
from errors import refused
from hlo import collectives, sequential, text
from plait import ContextParallel, Contiguous, HalfSwap, Placed, Striped, Zigzag
from plait.exchange import ChunkExchange, matchings
from plait.permute import Relayout
from sweeps import slow
from test_layout import layouts
from test_permute import DTYPES, sample

PLACED = Placed((0, 1, 1, 0, 1, 0, 2, 2, 3, 3, 2, 3))
"""Three chunks a rank in no order that a closed form would give."""


def length_of(layout, odd=True):
    """For stripes, one that leaves a remainder of stripes for the all-to-all to pad."""
    return layout.multiple * (layout.ranks + 1 if odd and isinstance(layout, Striped) else 2)


def expected(layout, shard_bytes):
    """What a move to or from source order communicates, on each device."""
    n = layout.ranks
    if n == 1 or isinstance(layout, Contiguous):
        return []
    if isinstance(layout, Striped):
        per_rank = length_of(layout) // layout.stripe // n
        rows = -(-per_rank // n)
        return [("all-to-all", shard_bytes * rows * n // per_rank)]
    if isinstance(layout, HalfSwap):
        return [("collective-permute", shard_bytes // 2)]
    if isinstance(layout, Zigzag):
        return [("collective-permute", shard_bytes // 2)] * (1 if n == 2 else 2)
    return None


def sharded(fn, mesh, names="context", check_vma=True, out=None):
    spec = P(None, names)
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=out or spec, check_vma=check_vma)
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, slow(4), slow(5), slow(6), slow(7), 8])
def test_inside_shard_map(ranks, mesh_of):
    for layout in layouts(ranks)[1:]:
        length = layout.multiple if isinstance(layout, Placed) else length_of(layout)
        x = np.arange(2 * length * 3, dtype=np.float32).reshape(2, length, 3)
        moved = oracle.reorder(x, layout, 1)
        cp = ContextParallel(layout, "context")
        there = sharded(cp.reorder, mesh_of(ranks))
        back = sharded(cp.restore, mesh_of(ranks), check_vma=False)
        oracle.same_bits(there(x), moved)
        oracle.same_bits(back(moved), x)
        wanted = expected(layout, x.nbytes // ranks)
        for fn in (there, back):
            program = text(fn, x)
            assert not sequential(program)
            found = collectives(program)
            if wanted is None:
                chunk = x.nbytes // len(layout.chunk_ranks)
                assert set(found) <= {("collective-permute", chunk)}
                assert len(found) <= len(layout.chunk_ranks) // ranks
            else:
                assert found == wanted, (layout, found, wanted)


@pytest.mark.parametrize("layout", [Zigzag(4), Zigzag(5), Zigzag(2), HalfSwap(4), PLACED])
def test_the_form_that_tpus_run(layout, mesh_of, monkeypatch):
    monkeypatch.setattr(ChunkExchange, "_select_in_place", ChunkExchange._update_in_place)
    jax.clear_caches()  # of what other tests lowered
    x = np.arange(2 * layout.multiple * 6, dtype=np.float32).reshape(2, -1, 3)
    moved = oracle.reorder(x, layout, 1)
    cp = ContextParallel(layout, "context")
    for check_vma in (True, False):
        oracle.same_bits(sharded(cp.reorder, mesh_of(layout.ranks), check_vma=check_vma)(x), moved)
        oracle.same_bits(sharded(cp.restore, mesh_of(layout.ranks), check_vma=check_vma)(moved), x)
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.parametrize("layout", [Zigzag(4), HalfSwap(4), Striped(4), PLACED])
def test_the_derivative_is_the_inverse_move(layout, mesh_of, rng):
    length = length_of(layout)
    x = rng.normal(size=(2, length, 3)).astype(np.float32)
    there = sharded(ContextParallel(layout, "context").reorder, mesh_of(4))

    def pull(x, y):
        return jax.vjp(there, x)[1](y)[0]

    oracle.same_bits(jax.jit(pull)(x, x), oracle.restore(x, layout, 1))
    program = text(pull, x, x)
    assert not sequential(program)
    assert collectives(program) == collectives(text(there, x))
    zeros = jnp.full(x.shape, -0.0, jnp.float32)
    assert np.signbit(np.asarray(jax.jit(pull)(zeros, zeros))).all()


def test_between_any_two_layouts(mesh_of):
    for source, target in itertools.product([*layouts(4)[:5], PLACED], repeat=2):
        length = int(np.lcm(source.multiple, target.multiple))
        x = np.arange(2 * length, dtype=np.int32).reshape(2, length)
        move = functools.partial(plait.relayout, source=source, target=target, axis_name="context")
        fn = sharded(move, mesh_of(4))
        oracle.same_bits(fn(x), oracle.relayout(x, source, target, 1))
        assert not sequential(text(fn, x))
        if source == target:
            assert not collectives(text(fn, x))


def test_zigzag_to_half_swap_is_direct(mesh_of):
    x = np.zeros((1, 64), np.float32)
    cp = ContextParallel(Zigzag(8), "context")
    program = text(sharded(lambda x: cp.relayout(x, HalfSwap(8)), mesh_of(8)), x)
    assert {kind for kind, _ in collectives(program)} == {"collective-permute"}
    assert sum(size for _, size in collectives(program)) <= x.nbytes // 8


@given(st.data())
def test_matchings_are_perfect_and_carry_every_chunk(data):
    ranks, per_rank = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    chunks = ranks * per_rank
    sources = np.array(data.draw(st.permutations(range(chunks))))
    found = matchings(sources, ranks)
    assert len(found) == per_rank
    carried = np.full(chunks, -1)
    for matching in found:
        assert sorted(matching.targets) == list(range(ranks))
        for rank, target in enumerate(matching.targets):
            place = target * per_rank + matching.filled[target]
            assert carried[place] == -1
            carried[place] = rank * per_rank + matching.sent[rank]
    np.testing.assert_array_equal(carried, sources)


def test_first_halves_stay_in_half_swap():
    move = Relayout(Contiguous(6), HalfSwap(6), 24)
    first, second = matchings(move.sources, 6)
    assert first.stays
    assert second.targets == (5, 4, 3, 2, 1, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_every_dtype(dtype, mesh_of):
    for layout in (Zigzag(4), HalfSwap(4), Striped(4)):
        x = sample(dtype, (2, length_of(layout), 3))
        spec = NamedSharding(mesh_of(4), P(None, "context"))
        there = sharded(ContextParallel(layout, "context").reorder, mesh_of(4))
        oracle.same_bits(there(jax.device_put(x, spec)), oracle.reorder(x, layout, 1))


def test_random_keys(mesh_of):
    keys = jax.random.split(jax.random.key(0), 16).reshape(1, 16)
    data = np.asarray(jax.random.key_data(keys))
    for layout in (Zigzag(4), Striped(4)):
        cp = ContextParallel(layout, "context")
        moved = sharded(cp.reorder, mesh_of(4))(keys)
        oracle.same_bits(jax.random.key_data(moved), oracle.reorder(data, layout, 1))
        with jax.set_mesh(mesh_of(4)):
            outside = jax.jit(cp.reorder)(keys)
        oracle.same_bits(jax.random.key_data(outside), oracle.reorder(data, layout, 1))


@pytest.mark.parametrize("layout", [Zigzag(4), HalfSwap(4), Striped(4), PLACED])
def test_all_gather_restores_first(layout, mesh_of, rng):
    length = length_of(layout)
    x = rng.normal(size=(2, length, 3)).astype(np.float32)
    moved = oracle.reorder(x, layout, 1)
    cp = ContextParallel(layout, "context")
    for check in (True, False):
        gather = sharded(
            lambda x: cp.all_gather(x)[None], mesh_of(4), check_vma=check, out=P("context")
        )
        whole = np.asarray(gather(moved))
        for rank in range(4):
            oracle.same_bits(whole[rank], x)
        w = rng.normal(size=whole.shape).astype(np.float32)

        def pull(x, w, gather=gather):
            return jax.vjp(gather, x)[1](w)[0]

        wanted = oracle.reorder(w.astype(np.float64).sum(0), layout, 1)
        np.testing.assert_allclose(jax.jit(pull)(moved, w), wanted, rtol=1e-5, atol=1e-6)
    # one shard is restored, then the whole is gathered; the transpose is the reverse
    move = collectives(text(sharded(cp.restore, mesh_of(4)), x))
    assert collectives(text(gather, x)) == sorted([*move, ("all-gather", x.nbytes)])
    scattered = ("reduce-scatter", x.nbytes // 4)
    assert collectives(text(pull, moved, w)) == sorted([*move, scattered])
    slots = sharded(lambda x: cp.all_gather(x, order="layout")[None], mesh_of(4), out=P("context"))
    oracle.same_bits(slots(moved)[2], moved)


TYPES = list(itertools.product((AxisType.Auto, AxisType.Explicit), repeat=3))


@pytest.mark.parametrize("types", TYPES, ids=lambda types: "".join(t.name[0] for t in types))
@pytest.mark.parametrize("names", ["c1", ("c1", "c2"), ("c2", "c1")], ids=str)
def test_outside_shard_map_on_every_mix_of_axis_types(types, names):
    """The moves wrap themselves, and no collective appears that they did not ask for."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "c1", "c2"), axis_types=types)
    ranks = 2 if names == "c1" else 4
    spec = P("data", names, "c2" if names == "c1" else None)
    layout_list = [Zigzag(ranks), HalfSwap(ranks), Striped(ranks)]
    if ranks == 4 and types[1] != types[2]:
        x = jnp.zeros((4, 16, 4))
        with jax.set_mesh(mesh), pytest.raises(ValueError, match="the same axis type"):
            plait.reorder(x, Zigzag(4), axis_name=names)
        return
    for layout in [*layout_list, PLACED] if ranks == 4 else layout_list:
        length = length_of(layout)
        host = np.arange(4 * length * 4, dtype=np.float32).reshape(4, length, 4)
        x = jax.device_put(host, NamedSharding(mesh, spec))
        y = jax.device_put(oracle.reorder(host, layout, 1), NamedSharding(mesh, spec))
        shard = host.nbytes // 8
        move = functools.partial(plait.reorder, layout=layout, axis_name=names)
        gather = functools.partial(plait.all_gather, layout=layout, axis_name=names)

        def pull(x, y, move=move):
            return jax.vjp(move, x)[1](y)[0]

        with jax.set_mesh(mesh):
            there = jax.jit(move)(x)
            programs = [text(move, x), text(pull, x, y), text(gather, y)]
            whole = jax.jit(gather)(y)
            oracle.same_bits(jax.jit(pull)(x, y), host)
        oracle.same_bits(there, np.asarray(y))
        oracle.same_bits(whole, host)
        assert there.sharding.is_equivalent_to(x.sharding, 3), there.sharding
        unsharded = NamedSharding(mesh, P("data", None, spec[2]))
        assert whole.sharding.is_equivalent_to(unsharded, 3), whole.sharding
        wanted = expected(layout, shard)
        if wanted is None:
            wanted = [("collective-permute", shard // 3)] * 2
        assert collectives(programs[0]) == wanted, layout
        assert collectives(programs[1]) == wanted, layout
        gathered = ("all-gather", shard * ranks)
        assert collectives(programs[2]) == sorted([*wanted, gathered]), layout
        assert not any(map(sequential, programs))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("how", ["array", "set_mesh", "mesh="])
def test_the_mesh_is_found(kind, how):
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(kind, kind))
    host = np.arange(64, dtype=np.float32).reshape(4, 16)
    spec = NamedSharding(mesh, P("data", "context"))
    x = jax.device_put(host, spec)
    cp = ContextParallel(Zigzag(4), "context")
    keyword = {"mesh": mesh} if how == "mesh=" else {}
    with jax.set_mesh(mesh) if how == "set_mesh" else contextlib.nullcontext():
        oracle.same_bits(cp.reorder(x, **keyword), oracle.reorder(host, Zigzag(4), 1))
        oracle.same_bits(cp.restore(cp.reorder(x, **keyword), **keyword), host)
        jitted = jax.jit(lambda x: cp.reorder(x, **keyword))
        oracle.same_bits(jitted(x), oracle.reorder(host, Zigzag(4), 1))


@pytest.mark.parametrize("layout", [Zigzag(4), Striped(4)])
def test_plain_arrays_with_a_mesh_in_hand(layout, mesh_of):
    host = np.arange(2 * length_of(layout), dtype=np.float32).reshape(2, -1)
    wanted = oracle.reorder(host, layout, 1)
    move = functools.partial(plait.reorder, layout=layout, axis_name="context", mesh=mesh_of(4))
    x = jnp.asarray(host)
    oracle.same_bits(move(x), wanted)
    oracle.same_bits(jax.jit(move)(x), wanted)
    oracle.same_bits(jax.jit(jax.vmap(move))(x[None])[0], wanted)
    oracle.same_bits(jax.vjp(move, x)[1](jnp.asarray(wanted))[0], host)
    oracle.same_bits(jax.jit(lambda x, y: jax.vjp(move, x)[1](y)[0])(x, wanted), host)
    wide = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Explicit, AxisType.Auto))
    beside = functools.partial(move, mesh=wide)
    oracle.same_bits(jax.jit(beside)(x), wanted)


def test_plain_arrays_are_laid_out(mesh_of):
    x = np.arange(32.0, dtype=np.float32).reshape(2, 16)
    with jax.set_mesh(mesh_of(8)):
        moved = ContextParallel(Zigzag(8), "context").reorder(jnp.asarray(x))
    oracle.same_bits(moved, oracle.reorder(x, Zigzag(8), 1))


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("layout", [Zigzag(8), HalfSwap(8), Striped(8, 3), layouts(8)[5]])
def test_two_mesh_axes_in_either_order(order, layout):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    length = length_of(layout)
    x = np.arange(length, dtype=np.int32)[None]
    cp = ContextParallel(layout, order)
    oracle.same_bits(sharded(cp.reorder, mesh, order)(x), oracle.reorder(x, layout, 1))
    moved = oracle.reorder(x, layout, 1)
    gather = sharded(lambda x: cp.all_gather(x)[None], mesh, order, out=P(order))
    oracle.same_bits(gather(moved)[5], x)


@pytest.mark.parametrize("layout", [Zigzag(4), Striped(4)])
def test_transformations(layout, mesh_of, rng):
    length = length_of(layout)
    x = rng.normal(size=(2, length)).astype(np.float32)
    moved = oracle.reorder(x, layout, 1)
    cp = ContextParallel(layout, "context")
    there = sharded(cp.reorder, mesh_of(4))
    twice = oracle.reorder(moved, layout, 1)

    def scan(x):
        return jax.lax.scan(lambda c, _: (cp.reorder(c), None), x, length=2)[0]

    oracle.same_bits(sharded(scan, mesh_of(4))(x), twice)
    oracle.same_bits(jax.jvp(there, (x,), (x,))[1], moved)
    oracle.same_bits(jax.vmap(there)(x[None])[0], moved)
    inner = sharded(jax.vmap(lambda row: cp.reorder(row, axis=0)), mesh_of(4))
    oracle.same_bits(inner(x), moved)
    remat = jax.checkpoint(lambda x: jnp.sin(there(x)).sum())
    np.testing.assert_allclose(jax.jit(jax.grad(remat))(x), np.cos(x), rtol=1e-5, atol=1e-6)
    spec = NamedSharding(mesh_of(4), P(None, "context"))
    donated = jax.jit(there, donate_argnums=0)(jax.device_put(x, spec))
    oracle.same_bits(donated, moved)
    with jax.set_mesh(mesh_of(4)):
        oracle.same_bits(jax.jit(jax.vmap(cp.reorder))(x[None])[0], moved)
        scanned = jax.jit(scan)(jax.device_put(x, spec))
    oracle.same_bits(scanned, twice)


@pytest.mark.parametrize("kinds", sorted({types[:2] for types in TYPES}, key=str))
@pytest.mark.parametrize("layout", [Zigzag(4), Striped(4)])
def test_vmap_beside_other_axes(kinds, layout):
    """The batch that vmap maps over is itself sharded."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=kinds)
    length = length_of(layout)
    host = np.arange(2 * 3 * length, dtype=np.float32).reshape(2, 3, length)
    x = jax.device_put(host, NamedSharding(mesh, P("data", None, "context")))
    cp = ContextParallel(layout, "context")
    with jax.set_mesh(mesh):
        for in_axis in (0, 1):
            moved = jax.jit(jax.vmap(cp.reorder, in_axes=in_axis, out_axes=in_axis))(x)
            oracle.same_bits(moved, oracle.reorder(host, layout, 2))
            program = text(jax.vmap(cp.reorder, in_axes=in_axis, out_axes=in_axis), x)
            assert collectives(program) == expected(layout, host.nbytes // 8)
            whole = jax.jit(jax.vmap(cp.all_gather, in_axes=in_axis, out_axes=in_axis))(moved)
            oracle.same_bits(whole, host)


def test_without_jit_inside_shard_map(mesh_of):
    x = np.arange(16.0, dtype=np.float32)[None]
    cp = ContextParallel(Zigzag(4), "context")
    eager = jax.shard_map(
        cp.reorder, mesh=mesh_of(4), in_specs=P(None, "context"), out_specs=P(None, "context")
    )
    oracle.same_bits(eager(x), oracle.reorder(x, Zigzag(4), 1))


def test_a_copy_on_every_rank_is_no_shard(mesh_of):
    """A forgotten entry of in_specs would give a loss over four copies, with right shapes."""
    shard = np.arange(8.0, dtype=np.float32)[None]
    cp = ContextParallel(Zigzag(4), "context")

    def forgotten(fn):
        return jax.jit(
            jax.shard_map(fn, mesh=mesh_of(4), in_specs=P(), out_specs=P(None, "context"))
        )

    for call in (
        cp.reorder,
        cp.all_gather,
        lambda x: cp.lookahead(x, fill=0),
        lambda x: cp.select(x, [0]),
        lambda x: cp.sum_and_count(x)[0][None, None],
        lambda x: cp.attention(*[x.reshape(1, -1, 1, 1)] * 3)[..., 0, 0],
    ):
        refused(
            lambda call=call: forgotten(call)(shard), "the same on every rank", "'context'", "pcast"
        )

    def meant(x):
        return cp.reorder(jax.lax.pcast(x, "context", to="varying"))

    wanted = oracle.reorder(np.tile(shard, (1, 4)), Zigzag(4), 1)
    oracle.same_bits(forgotten(meant)(shard), wanted)


def test_with_jit_disabled():
    x = sample("bfloat16", (1, 8))
    with jax.disable_jit():
        moved = plait.reorder(jnp.asarray(x), Zigzag(2))
    oracle.same_bits(moved, oracle.reorder(x, Zigzag(2), 1))


def test_a_manual_region_that_does_not_name_the_axis_is_refused():
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.zeros((2, 16))

    def over(names, fn):
        return lambda: jax.jit(
            jax.shard_map(
                fn, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names=set(names)
            )
        )(x)

    with jax.set_mesh(mesh):
        local = ContextParallel(Zigzag(4))
        refused(over(["data"], local.reorder), "manual over ['data']", "local=True")
        sharded_cp = ContextParallel(Zigzag(4), "context")
        refused(over(["data"], sharded_cp.reorder), "add ['context']")
        two = ContextParallel(Zigzag(8), ("data", "context"))
        refused(over(["data"], two.reorder), "add ['context']")
        meant = over(["data"], lambda x: local.reorder(x, local=True))()
    oracle.same_bits(meant, np.zeros((2, 16), np.float32))


def test_vmap_over_the_axis_name_is_refused():
    cp = ContextParallel(Zigzag(4), "context")
    refused(
        lambda: jax.vmap(lambda x: cp.reorder(x, 0), axis_name="context")(jnp.zeros((4, 16))),
        "'context' is bound by vmap",
    )


def test_errors_name_what_is_wrong(mesh_of):
    cp = ContextParallel(Zigzag(4), "context")
    on_mesh = functools.partial(cp.reorder, mesh=mesh_of(4))
    refused(
        lambda: on_mesh({"tokens": np.zeros((1, 2999))}),
        *("axis 1 of 'tokens' has length 2999", "Zigzag(4)", "multiple of 8", "pad to 3000"),
    )
    refused(lambda: on_mesh(jnp.zeros((1, 12))), "the array", "12", "16")
    refused(
        lambda: cp.reorder(jnp.zeros((1, 16)), mesh=mesh_of(2)),
        *("Zigzag(4) has 4 ranks", "'context' has 2", "a layout of 2 ranks"),
    )
    refused(lambda: plait.relayout(np.zeros(8), Zigzag(2), Zigzag(4), axis=0), "2 ranks", "has 4")
    refused(lambda: cp.reorder(jnp.zeros((1, 16))), "no mesh with axis 'context'", "set_mesh")
    refused(lambda: sharded(cp.reorder, mesh_of(8))(jnp.zeros((1, 64))), "has 8 devices")
    refused(lambda: sharded(cp.reorder, mesh_of(4))(jnp.zeros((1, 12))), "length 12", "pad to 16")
    refused(lambda: cp.all_gather(np.zeros((1, 16)), order="sorted"), "'sorted'", "'layout'")
    refused(lambda: plait.reorder(np.zeros((1, 8)), Zigzag(4), axis_name=3), "3", error=TypeError)
    many = Placed(np.tile(np.arange(4), 80))
    refused(
        lambda: plait.reorder(jnp.zeros((1, 640)), many, axis_name="context", mesh=mesh_of(4)),
        *("80 chunks of 2 tokens a rank", "on the host"),
    )


def test_a_sharded_axis_is_not_moved_as_if_it_were_whole():
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.zeros((1, 16)), NamedSharding(mesh, P(None, "context")))
    refused(lambda: plait.reorder(x, Zigzag(4)), "sharded over 'context'", "axis_name='context'")
    typed = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Explicit,))
    y = jax.device_put(np.zeros((1, 16)), NamedSharding(typed, P(None, "context")))
    with jax.set_mesh(typed):
        refused(lambda: jax.jit(lambda y: plait.reorder(y, Zigzag(4)))(y), "sharded over 'context'")
        whole = jax.device_put(np.zeros((1, 16)), NamedSharding(typed, P()))
        refused(
            lambda: plait.reorder(whole, Zigzag(4), axis_name="context"),
            *("not sharded over 'context'", "jax.sharding.reshard"),
        )
