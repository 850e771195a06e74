"""The layer of examples/sparse_layer.py against the same formulas in PyTorch, with S x S scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_layer
from plait import ContextParallel, Striped, Zigzag
from sweeps import slow

torch = pytest.importorskip("torch", reason="torch: pip install torch==2.13.0 on Python 3.11")

ROWS, LENGTH = 2, 64
SIZES = sparse_layer.Sizes(
    width=40, heads=3, q_latent=20, kv_latent=16, nope=8, rope=4, value=6,
    index_heads=2, index_dim=12, top_k=10,
)  # fmt: skip


def turned(x, positions, interleaved):
    """RoPE of [rows, sequence, heads, dim] by complex numbers."""
    half = x.shape[-1] // 2
    angles = positions[:, :, None, None] * 10_000.0 ** (-torch.arange(half) / half)
    pairs = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    z = torch.complex(*pairs) * torch.polar(torch.ones_like(angles), angles)
    if interleaved:
        return torch.view_as_real(z).flatten(-2)
    return torch.cat([z.real, z.imag], -1)


def rms(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def reference(p, x, positions, ids):
    """(out, scores [rows, S, S], selected or not [rows, S, S]) in source order."""
    length = x.shape[1]
    c_q = rms(x @ p["q_down"], p["q_norm"])
    c_kv = x @ p["kv_down"]
    latent, k_rope = rms(c_kv[..., : SIZES.kv_latent], p["kv_norm"]), c_kv[..., SIZES.kv_latent :]

    a, b = x.detach(), c_q.detach()
    iq = torch.einsum("bsl,lhd->bshd", b, p["index_q"])
    ik = torch.nn.functional.layer_norm(
        a @ p["index_k"], (SIZES.index_dim,), p["index_scale"], p["index_bias"], 1e-6
    )[:, :, None]
    iq, ik = (
        torch.cat([turned(y[..., : SIZES.rope], positions, False), y[..., SIZES.rope :]], -1)
        for y in (iq, ik)
    )
    w = a @ p["index_w"] * SIZES.index_heads**-0.5 * SIZES.index_dim**-0.5
    dots = torch.einsum("bthd,bsd->bths", iq, ik[:, :, 0])
    scores = torch.einsum("bths,bth->bts", torch.relu(dots), w)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen = seen & (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] != 0)
    # Where both heads are below zero scores are 0 exactly: the earlier position is the better.
    order = scores.masked_fill(~seen, -torch.inf).sort(dim=-1, descending=True, stable=True)
    best = order.indices[..., : SIZES.top_k]
    chosen = torch.zeros_like(seen).scatter(2, best, True) & seen

    q = torch.einsum("bsl,lhd->bshd", c_q, p["q_up"])
    q = torch.cat([q[..., : SIZES.nope], turned(q[..., SIZES.nope :], positions, True)], -1)
    k = torch.einsum("bsc,chn->bshn", latent, p["k_up"])  # not absorbed
    shared = turned(k_rope[:, :, None], positions, True).expand(-1, -1, SIZES.heads, -1)
    k, v = torch.cat([k, shared], -1), torch.einsum("bsc,chv->bshv", latent, p["v_up"])
    logits = torch.einsum("bthd,bshd->bhts", q, k) * SIZES.scale
    logits = logits.masked_fill(~chosen[:, None], -torch.inf)
    weights = torch.where(chosen.any(-1)[:, None, :, None], logits, 0.0).softmax(-1)
    weights = weights * chosen[:, None]
    mixed = torch.einsum("bhts,bshv->bthv", weights, v)
    return torch.einsum("bthv,hvw->btw", mixed, p["out"]), scores, chosen


NAMES = {
    "q_down": "kernel", "q_norm": "scale", "q_up": "kernel", "kv_down": "kernel",
    "kv_norm": "scale", "k_up": "kernel", "v_up": "kernel", "out": "kernel",
    "index_q": "kernel", "index_k": "kernel", "index_w": "kernel",
}  # fmt: skip


def arrays_of(state):
    found = {name: np.asarray(state[name][kind][...]) for name, kind in NAMES.items()}
    norm = state["index_norm"]
    return {
        **found,
        "index_scale": np.asarray(norm["scale"][...]),
        "index_bias": np.asarray(norm["bias"][...]),
    }


def close_row_by_row(found, wanted, relative, name):
    """Each row to `relative` of its own largest entry, or of a thousandth of the tensor's."""
    largest = np.abs(wanted).max(axis=-1, keepdims=True)
    over = np.abs(found - wanted) / np.maximum(largest, 1e-3 * largest.max())
    np.testing.assert_array_less(over, relative, err_msg=name)


@pytest.mark.parametrize("layout", [Zigzag(4), slow(Striped(2))], ids=str)
def test_the_layer_is_what_pytorch_computes(layout, mesh_of, rng):
    cp = ContextParallel(layout, "context")
    layer = sparse_layer.SparseAttention(cp, SIZES, rngs=nnx.Rngs(1))
    layer.index_norm.bias[...] = jnp.asarray(rng.normal(size=SIZES.index_dim), jnp.float32)
    batch = sparse_layer.make_batch(rng, ROWS, LENGTH, SIZES.width)
    d_out = rng.normal(size=batch["x"].shape).astype(np.float32)
    d_scores = rng.normal(size=(ROWS, LENGTH, LENGTH)).astype(np.float32)

    p = {
        name: torch.tensor(value, requires_grad=True)
        for name, value in arrays_of(nnx.state(layer)).items()
    }
    x = torch.tensor(batch["x"], requires_grad=True)
    ids = torch.tensor(batch["segment_ids"])
    wanted, scores, chosen = reference(p, x, torch.tensor(batch["positions"]), ids)
    loss = (wanted * torch.tensor(d_out)).sum()
    (loss + (scores * torch.tensor(d_scores))[chosen].sum()).backward()

    moved = cp.reorder({**batch, "d_out": d_out, "d_scores": d_scores})

    @nnx.jit
    def ours(layer, x):
        def loss(layer, x):
            out, selected, scores = layer(x, moved["positions"], moved["segment_ids"])
            weights = jnp.take_along_axis(moved["d_scores"], jnp.maximum(selected, 0), axis=2)
            scores = jnp.where(selected < 0, 0, scores)
            weights = jnp.where(selected < 0, 0, weights)
            return (out * moved["d_out"]).sum() + (scores * weights).sum(), (out, selected, scores)

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

    with jax.set_mesh(mesh_of(layout.ranks)):
        (d_layer, d_x), found = ours(layer, moved["x"])
    out, selected, selected_scores = (cp.restore(np.asarray(y)) for y in found)
    wanted, scores, chosen = (y.detach().numpy() for y in (wanted, scores, chosen))

    sets = np.zeros_like(chosen)
    rows, queries, _ = np.nonzero(selected >= 0)
    sets[rows, queries, selected[selected >= 0]] = True
    np.testing.assert_array_equal(sets, chosen)  # these inputs have no ties within rounding
    np.testing.assert_allclose(
        selected_scores[selected >= 0],
        scores[rows, queries, selected[selected >= 0]],
        rtol=0,
        atol=1e-5 * np.abs(scores[chosen]).max(),
    )
    close_row_by_row(out, wanted, 1e-5, "out")
    close_row_by_row(cp.restore(np.asarray(d_x)), x.grad.numpy(), 1e-4, "x")
    gradients = arrays_of(d_layer)
    for name, tensor in p.items():
        pair = (gradients[name], tensor.grad.numpy())
        rows = [g.reshape(len(g) if g.ndim > 1 else 1, -1) for g in pair]
        close_row_by_row(*rows, 1e-4, name)


def test_where_selections_differ_it_is_by_rounding(capsys):
    found = sparse_layer.main(length=128)
    assert found["rows that differ"] <= 0.01 * found["rows"]
    assert found["out"] < 1e-5
    assert "select the same keys" in capsys.readouterr().out
