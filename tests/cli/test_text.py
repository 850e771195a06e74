from collections import Counter

import numpy as np
import pytest

from plait.cli.text import pack, read_files, standard_library


def random_files(seed, count, most):
    random = np.random.default_rng(seed)
    return [
        (f"file{i}", random.integers(0, 256, random.integers(1, most), np.uint8).tobytes())
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length", [16, 100])
def test_every_byte_is_packed_once(seed, length):
    files = random_files(seed, count=30, most=70)
    packed = pack(files, length, rows=1000)
    taken = Counter(
        (piece.path, offset) for piece in packed.pieces for offset in range(piece.start, piece.stop)
    )
    assert taken == Counter((path, offset) for path, data in files for offset in range(len(data)))
    contents = dict(files)
    for piece in packed.pieces:
        slots = slice(piece.slot, piece.slot + piece.size)
        held = packed.tokens[piece.row, slots]
        assert held.astype(np.uint8).tobytes() == contents[piece.path][piece.start : piece.stop]
        assert len(set(packed.segment_ids[piece.row, slots].tolist())) == 1
    assert packed.left_out == 0
    assert packed.real_tokens == np.count_nonzero(packed.segment_ids)
    assert packed.files == len(files)
    assert packed.cuts == sum((len(data) - 1) // length for _, data in files)


@pytest.mark.parametrize("seed", range(5))
def test_segment_ids_count_documents_from_one_in_each_row(seed):
    packed = pack(random_files(seed, count=30, most=70), 100, rows=1000)
    for row, ids in enumerate(packed.segment_ids):
        documents = sum(piece.row == row for piece in packed.pieces)
        runs = ids[np.flatnonzero(np.diff(ids, prepend=-1))].tolist()
        assert runs in ([*range(1, documents + 1)], [*range(1, documents + 1), 0])


def test_only_as_many_files_are_taken_as_the_rows_hold():
    taken = []

    def files():
        for name in "abcdef":
            taken.append(name)
            yield name, b"x" * 10

    packed = pack(files(), 16, rows=2)
    assert taken == ["a", "b", "c"]
    assert packed.segment_ids.tolist() == [[1] * 10 + [0] * 6] * 2
    assert packed.left_out == 10


def test_a_cut_file_that_finds_no_room_counts_its_rest():
    packed = pack([("a", b"x" * 3), ("b", b"y" * 25)], 10, rows=2)
    assert [(piece.path, piece.start, piece.stop) for piece in packed.pieces] == [
        ("a", 0, 3),
        ("b", 0, 10),
    ]
    assert packed.left_out == 15


def test_byte_zero_is_a_token():
    packed = pack([("a", b"\0\0")], 4, rows=1)
    assert packed.segment_ids.tolist() == [[1, 1, 0, 0]]
    assert packed.real_tokens == 2


def test_files_are_shuffled_by_seed_alone(tmp_path):
    (tmp_path / "package" / "tests").mkdir(parents=True)
    for name in ["a.py", "b.py", "c.py", "d.py", "package/e.py"]:
        (tmp_path / name).write_bytes(name.encode())
    for name in ["empty.py", "not_python.txt", "package/tests/f.py"]:
        (tmp_path / name).write_bytes(b"" if name == "empty.py" else b"x")
    orders = [[path for path, _ in read_files(tmp_path, seed)] for seed in range(8)]
    for order in orders:
        assert sorted(order) == ["a.py", "b.py", "c.py", "d.py", "package/e.py"]
    assert orders == [[path for path, _ in read_files(tmp_path, seed)] for seed in range(8)]
    assert len({tuple(order) for order in orders}) > 1


def test_the_standard_library_is_there():
    path, data = next(read_files(standard_library(), 0))
    assert path.endswith(".py")
    assert data
