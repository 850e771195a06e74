"""DeepSeek sparse attention over a reordered sequence, by indices and never by a mask.

A lightning indexer scores every earlier token, `select` keeps the positions of the best for each
query, and `sparse_attention` attends to those alone (DeepSeek-V3.2). What is selected are source
positions: the same set, ties included, whatever the layout. No array is as large as the sequence
squared.
"""

from plait.sparse.attend import sparse_attention
from plait.sparse.indexer import K_BLOCK, Q_BLOCK, count_blocks, index_scores, select
from plait.sparse.indices import positions, slots

__all__ = [
    "K_BLOCK",
    "Q_BLOCK",
    "count_blocks",
    "index_scores",
    "positions",
    "select",
    "slots",
    "sparse_attention",
]
