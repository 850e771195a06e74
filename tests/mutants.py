"""Break plait on purpose, one plausible fault at a time, and see that the tests notice.

`python tests/mutants.py` copies the package, writes each fault into the copy and runs the tests
that ought to fail. It prints what was caught and exits with 1 if a fault survived. With words as
arguments it runs only the faults whose names hold one of them.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str


MOVE = "move_array(x, layout, target, axis, name, names=names, mesh=mesh, local=local)"

MUTANTS = [
    Mutant(
        "zigzag with an unreversed second half",
        "layout.py",
        "np.stack([rank, chunks - 1 - rank], axis=1)",
        "np.stack([rank, self.ranks + rank], axis=1)",
        "test_layout.py",
    ),
    Mutant(
        "half swap with unsorted chunks",
        "layout.py",
        "np.sort(np.stack([kept, chunks - 1 - kept], axis=1), axis=1)",
        "np.stack([kept, chunks - 1 - kept], axis=1)",
        "test_layout.py",
    ),
    Mutant(
        "document-major slots: still a permutation",
        "layout.py",
        "        return self._order\n",
        "        r, k = np.asarray(self.chunk_ranks), len(self.chunk_ranks) // 4\n"
        "        parts = [np.argsort(r[:k], kind='stable'), k + np.argsort(r[k:], kind='stable')]\n"
        "        return np.concatenate(parts).reshape(self.ranks, -1)\n",
        "test_layout.py",
    ),
    Mutant(
        "a length rounded down instead of refused",
        "layout.py",
        "if length < 1 or length % self.multiple:",
        "if length < 1:",
        "test_layout.py test_exchange.py::test_errors_name_what_is_wrong",
    ),
    Mutant(
        "a negative axis taken from the front",
        "tree.py",
        "return number % ndim",
        "return abs(number)",
        "test_permute.py::test_every_axis_of_every_rank",
    ),
    Mutant(
        "a derivative that is the move and not its inverse",
        "permute.py",
        "bijection=bijection.inverse(), axis=axis",
        "bijection=bijection, axis=axis",
        "test_permute.py::test_transformations test_exchange.py -k derivative",
    ),
    Mutant(
        "batching that forgets to shift the axis",
        "permute.py",
        "shifted = axis + (dim <= axis)",
        "shifted = axis",
        "test_permute.py::test_transformations",
    ),
    Mutant(
        "narrow floats copied as floats on the CPU",
        "permute.py",
        "and width in _altered_widths(bijection):",
        "and width in ():",
        "test_permute.py test_exchange.py -k every_bit",
    ),
    Mutant(
        "a move by jnp.take",
        "permute.py",
        "        shape = x.shape\n        before, after, length = shape[:axis]",
        "        if x.shape[axis] == self.sequence_length:\n"
        "            length = self.chunk_length\n"
        "            at = (self.sources * length)[:, None] + np.arange(length)\n"
        "            return jnp.take(x, at.reshape(-1), axis=axis)\n"
        "        shape = x.shape\n        before, after, length = shape[:axis]",
        "test_permute.py -k no_gather",
    ),
    Mutant(
        "a permutation within the shard",
        "exchange.py",
        "            if not matching.stays:\n",
        "            if False:\n",
        "test_exchange.py -k inside_shard_map[2]",
    ),
    Mutant(
        "a manual region without the axis passes silently",
        "mesh.py",
        "    if manual:\n        named =",
        "    if False:\n        named =",
        "test_exchange.py -k refused",
    ),
    Mutant(
        "a copy on every rank taken for a shard",
        "mesh.py",
        "    if same:\n",
        "    if False:\n",
        "test_exchange.py -k copy_on_every_rank",
    ),
    Mutant(
        "ranks numbered in mesh order, whatever the tuple says",
        "mesh.py",
        "[(self._mesh_index(a), self._mesh_index(b)) for a, b in pairs]",
        "list(pairs)",
        "test_exchange.py -k two_mesh_axes",
    ),
    Mutant(
        "stripes of an uneven all-to-all placed as if even",
        "exchange.py",
        "- striped_rank + ranks - 1\n",
        "- striped_rank\n",
        "test_exchange.py -k inside_shard_map[3]",
    ),
    Mutant(
        "an all-gather left in layout order",
        "exchange.py",
        '_contiguous(layout) if order == "source" else layout',
        "layout",
        "test_exchange.py -k all_gather",
    ),
    Mutant(
        "the whole tensor restored after the gather",
        "exchange.py",
        f"        x = {MOVE}\n"
        "        if isinstance(x, np.ndarray) or not names or local:\n"
        "            return x\n"
        '        if is_inside(names, f"gathering {name}"):\n'
        "            return gather_shards(x, axis, names)\n",
        '        if names and is_inside(names, f"gathering {name}"):\n'
        "            x = gather_shards(x, axis, names)\n"
        "            return permute(x, Relayout(layout, target, x.shape[axis]), axis)\n"
        f"        x = {MOVE}\n"
        "        if isinstance(x, np.ndarray) or not names or local:\n"
        "            return x\n",
        "test_exchange.py -k all_gather",
    ),
    Mutant(
        "labels taken after the split",
        "lookahead.py",
        "    value = _pull(x, layout, length, by, axis, axes)\n",
        "    value = jnp.roll(x, -by, axis)\n",
        "test_lookahead.py -k by_hand",
    ),
    Mutant(
        "the next token whatever k is",
        "lookahead.py",
        "chunks_on, within = divmod(by, chunk)",
        "chunks_on, within = divmod(1, chunk)",
        "test_lookahead.py -k by_hand",
    ),
    Mutant(
        "labels that look into the next document",
        "lookahead.py",
        "found = found & (pulled == segment_ids) & (segment_ids != 0)",
        "found = found & (segment_ids != 0)",
        "test_lookahead.py -k by_hand",
    ),
    Mutant(
        "labels in padding",
        "lookahead.py",
        "found = exists & (ids[..., slots] == ids) & (ids != 0)",
        "found = exists & (ids[..., slots] == ids)",
        "test_lookahead.py -k padding",
    ),
    Mutant(
        "a mask by slot",
        "positions.py",
        "    return _spread(jnp.asarray(starts.reshape(-1)), length)\n",
        "    return lax.iota(jnp.int32, sequence_length)\n",
        "attention/test_front.py -k heads_masks",
    ),
    Mutant(
        "queries masked by slot, keys by position",
        "positions.py",
        "    return _spread(of_rank(starts, rank), length)\n",
        "    return lax.iota(jnp.int32, per_rank) + rank * per_rank\n",
        "attention/test_front.py -k float64_on_every_layout[False-3]",
    ),
    Mutant(
        "the check of types on under vmap over stages",
        "attention/front.py",
        "check_vma=not vmapped",
        "check_vma=True",
        "test_pipelines.py -k gathers_keys_and_values_alone[2-auto]",
    ),
    Mutant(
        "the check of types never on: gradients summed over copies",
        "attention/front.py",
        "check_vma=not vmapped",
        "check_vma=False",
        "test_pipelines.py -k copies_on_an_axis",
    ),
    Mutant(
        "values gathered without a name",
        "attention/strategies/all_gather.py",
        "gather_shards(v, 1, axes.names, GATHERED_VALUES)",
        "gather_shards(v, 1, axes.names, 'values')",
        "test_names.py -k once[scan-auto]",
    ),
    Mutant(
        "relaid without a name outside of shard_map",
        "exchange.py",
        "        x = _over_mesh(step, axis, Axes.on(mesh, names), mesh)(x)\n"
        "    return named(x, *RELAID) if steps else x",
        "        x = _over_mesh(step, axis, Axes.on(mesh, names), mesh)(x)\n    return x",
        "test_names.py -k not_repeated[relay-",
    ),
    Mutant(
        "attention across documents",
        "attention/kernels/blockwise.py",
        "visible &= (q_ids[:, None] == k_ids[None, :]) & (k_ids[None, :] != 0)",
        "visible &= k_ids[None, :] != 0",
        "attention/test_front.py -k another_document",
    ),
    Mutant(
        "padding that attends to padding",
        "attention/kernels/blockwise.py",
        "visible &= (q_ids[:, None] == k_ids[None, :]) & (k_ids[None, :] != 0)",
        "visible &= q_ids[:, None] == k_ids[None, :]",
        "attention/test_front.py::test_lse_and_its_gradient",
    ),
    Mutant(
        "an undefined loss in padding that spreads",
        "attention/front.py",
        "            out = jnp.where(real, out, 0)\n",
        "            pass\n",
        "attention/test_front.py -k undefined_loss",
    ),
    Mutant(
        "a wholly masked row divided by zero",
        "attention/kernels/blockwise.py",
        "jnp.where(total == 0, 1.0, total)",
        "total",
        "attention/test_front.py::test_a_row_of_a_kernel_that_sees_nothing",
    ),
    Mutant(
        "the gradient of the scores without the scale",
        "attention/kernels/base.py",
        "return scaled, self.scale",
        "return scaled, 1.0",
        "attention/test_front.py -k heads_masks",
    ),
    Mutant(
        "query heads dealt to the wrong key heads",
        "attention/kernels/blockwise.py",
        "    return x.reshape(x.shape[0], x.shape[1] // group, -1, *x.shape[3:])",
        "    x = x.reshape(x.shape[0], group, -1, *x.shape[2:]).swapaxes(1, 2)\n"
        "    return x.reshape(*x.shape[:2], -1, *x.shape[4:])",
        "attention/test_front.py -k heads_masks",
    ),
    Mutant(
        "half-visible blocks skipped",
        "mask.py",
        "return _any(_inside(k_most, k_least, low[0], high[1]) for low, high in ends)",
        "return _any(_inside(k_least, k_most, low[0], high[1]) for low, high in ends)",
        "test_mask.py attention/test_front.py -k 'block or heads_masks'",
    ),
    Mutant(
        "no block skipped",
        "mask.py",
        "return _any(_inside(k_most, k_least, low[0], high[1]) for low, high in ends)",
        "return k_least <= k_most",
        "attention/test_front.py -k skipped_blocks",
    ),
    Mutant(
        "a sliding window from the wrong end of a block of queries",
        "mask.py",
        "return _any(_inside(k_most, k_least, low[0], high[1]) for low, high in ends)",
        "return _any(_inside(k_most, k_least, high[0], high[1]) for low, high in ends)",
        "test_mask.py -k empty",
    ),
    Mutant(
        "a block called full that is partial",
        "mask.py",
        "return _any(_inside(k_least, k_most, high[0], low[1]) for low, high in ends)",
        "return _any(_inside(k_least, k_most, low[0], low[1]) for low, high in ends)",
        "test_mask.py -k 'empty or told_apart'",
    ),
    Mutant(
        "keys of overlapping intervals counted twice",
        "mask.py",
        "first = np.maximum(first, reached + 1)",
        "first = np.maximum(first, 0)",
        "test_mask.py -k counted_exactly",
    ),
    Mutant(
        "the other half of a ring's step",
        "attention/strategies/ring.py",
        "of_rank(firsts, self.source(shift)) < of_rank(firsts, self.axes.rank())",
        "of_rank(firsts, self.source(shift)) > of_rank(firsts, self.axes.rank())",
        "attention/test_strategies.py -k 'any_number and False'",
    ),
    Mutant(
        "gradients of keys left with the last rank of the ring",
        "attention/strategies/ring.py",
        "walk.pass_on(sums, -walk.shifts[-1])",
        "walk.pass_on(sums, 0)",
        "attention/test_strategies.py -k 'any_number and False'",
    ),
    Mutant(
        "a ring that turns the other way than its positions",
        "attention/strategies/ring.py",
        "pairs = [(rank, (rank + by) % ranks) for rank in range(ranks)]",
        "pairs = [(rank, (rank - by) % ranks) for rank in range(ranks)]",
        "attention/test_strategies.py -k 'any_number and False'",
    ),
    Mutant(
        "no step left out of a ring",
        "attention/strategies/ring.py",
        "return tuple(sorted({0, *((query - key) % ranks).tolist()}))",
        "return tuple(range(ranks))",
        "attention/test_strategies.py -k nobody_needs",
    ),
    Mutant(
        "a step too few in a ring",
        "attention/strategies/ring.py",
        "return tuple(sorted({0, *((query - key) % ranks).tolist()}))",
        "return tuple(sorted({0, *((query - key) % ranks).tolist()}))[:-1]",
        "attention/test_strategies.py -k nobody_needs",
    ),
    Mutant(
        "two empty parts merged to NaN",
        "attention/kernels/base.py",
        "peak = jnp.where(peak == -jnp.inf, 0.0, peak)",
        "peak = peak + 0.0",
        "attention/test_strategies.py -k two_empty",
    ),
    Mutant(
        "copies of kv heads in the wrong order",
        "attention/strategies/ulysses.py",
        "jnp.repeat(x, copies, axis=2)",
        "jnp.tile(x, (1, 1, copies, 1))",
        "attention/test_strategies.py -k 'pair_of_choices and ulysses'",
    ),
    Mutant(
        "USP's groups left in the order of their ranks",
        "attention/strategies/ulysses.py",
        "arrays = jax.tree.map(lambda x: permute(x, move, 1), arrays)",
        "arrays = jax.tree.map(lambda x: x, arrays)",
        "attention/test_strategies.py -k 'pair_of_choices and usp-zigzag'",
    ),
    Mutant(
        "a softcap without its slope",
        "attention/kernels/base.py",
        "self.scale * (1 - capped * capped)",
        "self.scale",
        "attention/test_strategies.py -k 'pair_of_choices and softcap'",
    ),
    Mutant(
        "sinks that are no part of the sum",
        "attention/front.py",
        "jnp.where(blind, 0.0, jnp.exp(lse - total))[..., None]",
        "jnp.where(blind, 0.0, jnp.exp(total - total))[..., None]",
        "attention/test_strategies.py -k 'pair_of_choices and sinks'",
    ),
    Mutant(
        "boolean maps added as booleans",
        "attention/cost.py",
        "np.mean([f(mask, bounds, bounds) for f in (block_map, full_blocks)], axis=0)",
        "(block_map(mask, bounds, bounds) + full_blocks(mask, bounds, bounds)) / 2",
        "attention/test_strategies.py -k adds_up",
    ),
    Mutant(
        "a mean of the ranks' means",
        "reduce.py",
        "lax.psum(as_varying(count, over), over)",
        "lax.pmean(as_varying(count, over), over)",
        "test_reduce.py",
    ),
    Mutant(
        "positions within documents that run on",
        "positions.py",
        "ids[..., 1:] != ids[..., :-1]",
        "ids[..., 1:] < ids[..., :-1]",
        "test_positions.py -k segment",
    ),
    Mutant(
        "MaxText's to_contiguous the wrong way round",
        "integrations/maxtext.py",
        "reversed(ends) if back else ends",
        "ends if back else reversed(ends)",
        "integrations/test_maxtext.py -k by_hand",
    ),
    Mutant(
        "one of MaxText's keys left in source order",
        "integrations/maxtext.py",
        '        "targets_loss_mask",\n',
        "",
        "integrations/test_maxtext.py -k batch_by_hand",
    ),
    Mutant(
        "a sequence over other than cp_size devices moved over them",
        "integrations/maxtext.py",
        "    if size == layout.ranks:\n",
        "    if True:\n",
        "integrations/test_maxtext.py -k sharded_over_a_mesh",
    ),
    Mutant(
        "multi-token targets from the next document",
        "integrations/maxtext.py",
        "segment_ids=segment_ids, fill=0",
        "segment_ids=None, fill=0",
        "integrations/test_maxtext.py -k deeper_targets",
    ),
    Mutant(
        "a block copied from the chunk's own place",
        "block_copy.py",
        "place[axis] = table[chunk] * parts + lax.rem(place[axis], np.int32(parts))",
        "place[axis] = chunk * parts + lax.rem(place[axis], np.int32(parts))",
        "test_block_copy.py -k oracle",
    ),
    Mutant(
        "the blocks of a chunk out of step",
        "block_copy.py",
        "table[chunk] * parts + lax.rem(place[axis], np.int32(parts))",
        "table[chunk] * parts",
        "test_block_copy.py -k several",
    ),
    Mutant(
        "a view in an order that XLA does not lay arrays out in",
        "block_copy.py",
        "pair = min(latest_first, key=padding)",
        "pair = latest_first[0]",
        "test_floors.py -k any_shape",
    ),
    Mutant(
        "chunks written in the order of their permutes",
        "exchange.py",
        "starts = np.array(matching.filled, np.int32) * length",
        "starts = np.array(matching.sent, np.int32) * length",
        "test_exchange.py -k tpus",
    ),
    Mutant(
        "a loop counted as one turn",
        "audit/hlo.py",
        "return instruction.module.unknown_turns if known is None else known",
        "return 1",
        "audit/test_hlo.py",
    ),
    Mutant(
        "a fusion that reads of a slice the whole",
        "audit/hlo.py",
        "            read += user.result_bytes\n",
        "            return parameter.result_bytes\n",
        "audit/test_hlo.py",
    ),
    Mutant(
        "both halves of an asynchronous pair counted",
        "audit/hlo.py",
        'return self.opcode.endswith(("-done", "-update"))',
        "return False",
        "audit/test_hlo.py",
    ),
    Mutant(
        "requirements that are never looked at",
        "audit/report.py",
        "    if wanted is None or found == wanted:",
        "    if True:",
        "audit/test_hlo.py",
    ),
    Mutant(
        "tokens that stay counted as sent",
        "audit/floors.py",
        "np.bincount(rank_before[rank_before != rank_after],",
        "np.bincount(rank_before,",
        "audit/test_floors.py",
    ),
    Mutant(
        "an all-gather's floor with the shard that is there",
        "cli/variants.py",
        "(layout.ranks - 1) * length // layout.ranks",
        "length",
        "cli/test_audit.py -k side_by_side",
    ),
    Mutant(
        "a page that takes names for markup",
        "cli/page.py",
        "<b>{escape(c.kind)}</b>",
        "<b>{c.kind}</b>",
        "cli/test_audit.py -k markup",
    ),
    Mutant(
        "bars that all fill their room",
        "cli/page.py",
        "scale = _PLOT / report.hbm_bytes if is_cut else scale",
        "scale = _PLOT / report.hbm_bytes",
        "cli/test_audit.py -k parts_of_a_bar",
    ),
    Mutant(
        "a fusion in a fusion that reads its operands whole",
        "audit/hlo.py",
        "            read += sum(_read_of(i, within) for i in inner if i.message.parameter_number"
        " in places)\n",
        "            return value.result_bytes\n",
        "audit/test_hlo.py",
    ),
    Mutant(
        "an operand that a fusion in a fusion hands on not read",
        "audit/hlo.py",
        "    if value is value.computation.root:\n",
        "    if False:\n",
        "audit/test_hlo.py -k hands_on",
    ),
    Mutant(
        "a narrow counter without its sign",
        "audit/hlo.py",
        'value - 2**bits if kind[0] == "s" and value >= 2 ** (bits - 1) else value',
        "value",
        "audit/test_hlo.py -k any_width",
    ),
    Mutant(
        "static arguments taken for arrays",
        "audit/arguments.py",
        "        if probe.hashed:\n",
        "        if False:\n",
        "audit/test_compile_for.py -k static_arguments",
    ),
    Mutant(
        "scalars compiled without their weak types",
        "audit/arguments.py",
        'weak = bool(getattr(x, "weak_type", False))',
        "weak = False",
        "audit/test_compile_for.py -k as_weak",
    ),
    Mutant(
        "a loop whose length is data counted once",
        "audit/hlo.py",
        "return instruction.module.unknown_turns if known is None else known",
        "return 1 if known is None else known",
        "audit/test_hlo.py",
    ),
    Mutant(
        "no estimate taken for the longest one",
        "audit/hlo.py",
        "return 0 if cycles == _NO_ESTIMATE else cycles",
        "return cycles",
        "audit/test_hlo.py",
    ),
    Mutant(
        "an index causal by slot",
        "sparse/indexer.py",
        "positions = own_positions(self.layout, k.shape[1], axes, batch)",
        "first = 0 if axes is None else axes.rank() * tokens\n"
        "            positions = jnp.broadcast_to(first + jnp.arange(tokens), (batch, tokens))",
        "sparse/test_select.py -k zigzag",
    ),
    Mutant(
        "index keys scored in the order of their slots",
        "sparse/indexer.py",
        "functools.partial(restore, local=True) if axes is None else all_gather",
        "functools.partial(all_gather, local=axes is None, order='layout')",
        "sparse/test_select.py -k zigzag",
    ),
    Mutant(
        "ties to the key that came last",
        "sparse/indexer.py",
        "lax.sort(both, dimension=1, num_keys=2, is_stable=False)",
        "lax.sort([x[:, ::-1] for x in both], dimension=1, num_keys=1)",
        "sparse/test_select.py -k same_set",
    ),
    Mutant(
        "ties to the later position",
        "sparse/indexer.py",
        "ordered = lax.sort(both, dimension=1, num_keys=2, is_stable=False)",
        "a, b = lax.sort([both[0], -both[1]], dimension=1, num_keys=2)\n    ordered = a, -b",
        "sparse/test_select.py -k same_set",
    ),
    Mutant(
        "everything above the threshold, then by slot",
        "sparse/indexer.py",
        "return tuple(x[:, :top_k] for x in ordered)",
        "kept = lax.sort([ordered[1][:, :top_k], ordered[0][:, :top_k]], dimension=1, num_keys=1)\n"
        "    return kept[1], kept[0]",
        "sparse/test_select.py -k same_set",
    ),
    Mutant(
        "a NaN score that nobody sees",
        "sparse/indexer.py",
        "jnp.where(jnp.isnan(scores), jnp.inf, scores)",
        "jnp.where(jnp.isnan(scores), -jnp.inf, scores)",
        "sparse/test_select.py -k nans",
    ),
    Mutant(
        "an index that selects padding",
        "sparse/indexer.py",
        " & (k_ids != 0)\n",
        "\n",
        "sparse/test_select.py -k packed",
    ),
    Mutant(
        "index weights inside the relu",
        "sparse/indexer.py",
        "(jax.nn.relu(products) * w.astype(jnp.float32)[..., None])",
        "jax.nn.relu(products * w.astype(jnp.float32)[..., None])",
        "sparse/test_select.py -k same_set",
    ),
    Mutant(
        "a maximum for the relu of the index",
        "sparse/indexer.py",
        "jax.nn.relu(products)",
        "jnp.maximum(products, 0)",
        "sparse/test_sparse_attention.py -k relu",
    ),
    Mutant(
        "an absent index key read at the first slot",
        "sparse/indexer.py",
        "jnp.where(absent[..., None], 0, k[jnp.maximum(slots, 0)])",
        "k[jnp.maximum(slots, 0)]",
        "sparse/test_sparse_attention.py -k relu",
    ),
    Mutant(
        "int8 products rounded to bfloat16",
        "sparse/indexer.py",
        "jnp.einsum(equation, q, k, preferred_element_type=jnp.int32)",
        "jnp.einsum(equation, q, k, preferred_element_type=jnp.bfloat16)",
        "sparse/test_select.py -k narrow",
    ),
    Mutant(
        "latents looked up by position",
        "sparse/indexer.py",
        "slots = slots_of_positions(layout, length, clipped)",
        "slots = clipped",
        "sparse/test_sparse_attention.py -k every_layout",
    ),
    Mutant(
        "an absent key taken for the first",
        "sparse/attend.py",
        "jnp.where((slots < 0)[:, None], -jnp.inf, dots)",
        "dots",
        "sparse/test_sparse_attention.py -k every_layout",
    ),
    Mutant(
        "latents' gradients as keys alone",
        "sparse/attend.py",
        '_dot("qhs,qhd->qsd", p.astype(q.dtype), d_out)',
        '0 * _dot("qhs,qhd->qsd", p.astype(q.dtype), d_out)',
        "sparse/test_sparse_attention.py -k every_layout",
    ),
    Mutant(
        "what padding gives lands on the first token",
        "sparse/attend.py",
        "jnp.where(slots < 0, nowhere, slots)",
        "jnp.maximum(slots, 0)",
        "sparse/test_sparse_attention.py -k padding",
    ),
    Mutant(
        "a tied maximum whose share is counted on one rank",
        "documents.py",
        "share = over_ranks(lax.psum, at_largest.sum(axis=-2, dtype=jnp.int32))",
        "share = at_largest.sum(axis=-2, dtype=jnp.int32)",
        "test_documents.py::test_values_and_derivatives_at_any_number_of_ranks "
        "test_documents.py::test_gradients_inside_the_region",
    ),
    Mutant(
        "a maximum over ranks without a derivative",
        "documents.py",
        "return largest + added / jnp.maximum(share, 1).astype(jnp.float32)",
        "return largest",
        "test_documents.py::test_values_and_derivatives_at_any_number_of_ranks",
    ),
    Mutant(
        "a document beyond the last that vanishes",
        "documents.py",
        "jnp.where((ids < 0) | (ids > documents), jnp.nan, 0)",
        "jnp.where((ids < 0) | (ids > documents), 0, 0)",
        "test_documents.py::test_an_id_out_of_range_does_not_vanish",
    ),
    Mutant(
        "NaN of one run alone taken for agreement",
        "testing/difference.py",
        "(np.isnan(wanted) & np.isnan(found))",
        "(np.isnan(wanted) | np.isnan(found))",
        "test_testing.py::test_nan_and_infinity_of_one_only_are_differences",
    ),
    Mutant(
        "an absolute tolerance that small outputs hide under",
        "testing/difference.py",
        "rtol * float(np.sqrt(np.mean(sizes**2))) if sizes.size else 0.0",
        "1e-4",
        "test_testing.py::test_scalars_and_gradients_are_compared_as_they_are",
    ),
    Mutant(
        "an order that one rank alone vouches for",
        "testing/order.py",
        "return lax.psum(as_varying(wrong, over), over) == 0",
        "return lax.pmin(as_varying(wrong, over), over) == 0",
        "test_testing.py::test_one_wrong_slot_on_one_rank",
    ),
    Mutant(
        "a batch on devices in source order",
        "placing.py",
        "layout.positions(length)[index[axis]]",
        "np.arange(length)[index[axis]]",
        "test_placing.py",
    ),
    Mutant(
        "a batch reordered by the positions of other rows",
        "placing.py",
        "order = positions[index[0], index[axis]]",
        "order = positions[: part.shape[0], index[axis]]",
        "test_placing.py",
    ),
    Mutant(
        "labels across documents in the pipeline",
        "integrations/grain.py",
        "np.atleast_2d(y), Contiguous(1), self.by, segment_ids=np.atleast_2d(ids), fill=fill",
        "np.atleast_2d(y), Contiguous(1), self.by, fill=fill",
        "integrations/test_grain.py",
    ),
    Mutant(
        "the end of a long document lost",
        "integrations/grain.py",
        "for start in range(0, length, self.step)",
        "for start in range(0, length - self.step + 1, self.step)",
        "integrations/test_grain.py",
    ),
    Mutant(
        "chunks dealt in the order of the text, not heaviest first",
        "packing/solver.py",
        'np.argsort(-works, kind="stable").tolist()',
        "range(works.size)",
        "packing/test_solver.py",
    ),
    Mutant(
        "an exchange that moves the whole gap, not half of it",
        "packing/solver.py",
        "    apart *= 2\n",
        "",
        "packing/test_solver.py",
    ),
    Mutant(
        "a lower bound without what lies beside the heaviest chunk",
        "packing/solver.py",
        " + sums[places - sharing - 1]",
        "",
        "packing/test_solver.py",
    ),
    Mutant(
        "tiles that a document before begins are missed",
        "packing/work.py",
        'k.most_id[has_keys], q.least_id[has_queries], side="left"',
        'k.most_id[has_keys], q.least_id[has_queries], side="right"',
        "packing/test_work.py",
    ),
    Mutant(
        "runs of keys joined across gaps",
        "packing/needed.py",
        " | (begin[1:] > end[:-1])",
        "",
        "packing/test_work.py",
    ),
    Mutant(
        "exact pairs balanced where tiles were asked for",
        "packing/balance.py",
        "work = pairs if tiles is None else tiles",
        "work = pairs",
        "packing/test_balance.py",
    ),
    Mutant(
        "worst fit",
        "packing/pack.py",
        "with_room.pop(at)",
        "with_room.pop()",
        "packing/test_pack.py",
    ),
    Mutant(
        "every piece of a cut document at its start",
        "packing/pack.py",
        "document[piece.start : piece.stop] = ",
        "document[: piece.length] = ",
        "packing/test_pack.py",
    ),
    Mutant(
        "pairs with documents that came before",
        "cli/plan/pairs.py",
        "    before -= before[block[place == 0]][document[begins]]\n",
        "",
        "cli/test_plan.py -k oracle",
    ),
    Mutant(
        "a ring whose ranks wait for nobody",
        "cli/plan/estimates.py",
        "for busiest in steps.max(axis=0)]",
        "for busiest in steps.mean(axis=0)]",
        "cli/test_plan.py",
    ),
    Mutant(
        "time by visible pairs where a kernel computes tiles",
        "cli/plan/estimates.py",
        "        return row.tiles\n",
        "        return row.pairs\n",
        "cli/test_plan.py -k tiles",
    ),
    Mutant(
        "records counted anew in every batch",
        "cli/plan/files.py",
        'f"record {start + int(wrong[0])} {of}"',
        'f"record {int(wrong[0])} {of}"',
        "cli/test_plan.py -k batches",
    ),
    Mutant(
        "the emptiest row looked at",
        "cli/plan/documents.py",
        "full = np.delete(np.arange(count), int(np.argmin(tokens)))",
        "full = np.arange(count)",
        "cli/test_plan.py -k packed",
    ),
    Mutant(
        "an error that waits for the other processes",
        "cli/processes.py",
        "    os._exit(status)\n",
        "    raise SystemExit(status)\n",
        "cli/test_processes.py -k heartbeat",
    ),
    Mutant(
        "a heartbeat that nobody set",
        "cli/processes.py",
        "            heartbeat_timeout_seconds=heartbeat_seconds,\n",
        "",
        "cli/test_processes.py -k heartbeat",
    ),
]


def caught(mutant: Mutant, root: pathlib.Path) -> bool:
    """Whether the tests fail on a copy of the package that holds the fault."""
    with tempfile.TemporaryDirectory() as scratch:
        package = pathlib.Path(scratch) / "plait"
        shutil.copytree(root / "src" / "plait", package)
        path = package / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.name}: its line stands {text.count(mutant.old)} times")
        path.write_text(text.replace(mutant.old, mutant.new))
        tests = f"cd '{root / 'tests'}' && '{sys.executable}' -m pytest -x -q -p no:cacheprovider"
        run = subprocess.run(
            f"{tests} {mutant.tests.replace('[', chr(92) + '[').replace(']', chr(92) + ']')}",
            shell=True,
            env={**os.environ, "PYTHONPATH": scratch},
            capture_output=True,
            text=True,
        )
    if run.returncode not in (0, 1):
        raise SystemExit(f"{mutant.name}: the tests did not run\n{run.stdout}{run.stderr}")
    return run.returncode == 1


def main(words: list[str]) -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    survivors = 0
    for mutant in chosen:
        start = time.perf_counter()
        found = caught(mutant, root)
        survivors += not found
        verdict = "caught  " if found else "SURVIVED"
        print(f"{verdict} {time.perf_counter() - start:5.1f} s  {mutant.name}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults caught")
    return bool(survivors)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
