import jax
import numpy as np
import pytest

import bench_reorder
import pages
import peers
from bench_reorder import LATENT, LOCAL, SHARDED, Case
from plait import Zigzag


def test_the_oracle_is_zigzag():
    assert peers.order(2, 8, False).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    for back, wanted in ((False, Zigzag(3).positions(24)), (True, Zigzag(3).slots(24))):
        np.testing.assert_array_equal(peers.order(3, 24, back), wanted)


@pytest.mark.parametrize("form", [*peers.PEERS.values(), peers.plait_local])
def test_every_form_is_the_same_move(form):
    peers.check(form)


def test_a_wrong_form_is_not_compared():
    with pytest.raises(AssertionError):
        peers.check(lambda x, ranks, axis, back: peers.strided(x, ranks, axis, not back))


def case(place, form, backward=False):
    return Case(place, form, "restore", backward, LATENT, 256, 8, "cpu:8")


@pytest.mark.parametrize("backward", [False, True])
def test_static_rows(backward):
    rows = {form: bench_reorder.compile_case(case("sharded", form, backward)) for form in SHARDED}
    assert rows["plait"]["collectives"] == {"collective-permute": 2}
    assert rows["plait"]["stages"] == 1
    assert rows["plait"]["sequential"] == {}
    assert rows["plait"]["traffic_units"] == 1
    assert rows["take"]["sequential"]
    assert min(rows, key=lambda form: rows[form]["traffic_units"]) == "plait"


def test_an_all_gather_costs_a_shard_more_than_a_plain_one():
    plain, ours = (
        bench_reorder.compile_case(case("gather", form))["traffic_units"]
        for form in ("no reorder", "plait")
    )
    assert ours == pytest.approx(plain + 1 / 8)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("place", "forms"), [("local", LOCAL), ("sharded", SHARDED)])
def test_timed_rows_are_checked_against_the_oracle(place, forms, backward):
    sizes = ("restore", backward, LATENT, 256, 8, "local")
    rows = bench_reorder.time_cases([Case(place, form, *sizes) for form in forms], repeats=2)
    assert [row["form"] for row in rows] == list(forms)
    assert all(row["ratio"]["median"] > 0 for row in rows)


def test_a_result_that_is_wrong_is_not_timed():
    x = np.arange(256 * 576, dtype=np.float32).reshape(1, 256, 576)
    with pytest.raises(AssertionError):
        bench_reorder._check_result(case("local", "plait"), x, x)


def test_the_page_says_what_was_measured(tmp_path):
    row = bench_reorder.compile_case(case("sharded", "plait"))
    at_home = {"topology": bench_reorder.V5P, "ranks": 128, "length": 131072}
    static = [
        {**row, **at_home},
        {**row, **at_home, "backward": True, "hbm_units": 12.3456},
        {**row, "topology": "h200:1x1x8"},
    ]
    results = {"date": "today", "jax": jax.__version__, "libtpu": "none", "static": static}
    joined = bench_reorder._joined(
        [{**results, "timed": [1]}, {"date": "later", "jax": "9", "static": [], "timed": []}]
    )
    assert (joined["jax"], joined["static_date"], joined["timed"]) == (
        jax.__version__,
        "today",
        [1],
    )
    again = bench_reorder._joined(
        [joined, {**results, "date": "later", "static": [], "timed": [2]}]
    )
    assert (again["static"], again["timed"]) == (static, [2])
    assert (again["static_date"], again["timed_date"]) == ("today", "later")
    text = bench_reorder.page({**joined, "timed": []})
    assert "| latent [1,S,576] |  |  |  |  | 12.35 (2 in 1) |  |" in text
    assert "### h200, other sizes" in text
    assert "latent [1,S,576], 8 ranks, 0K" in text
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- part -->\nold\n<!-- end of part -->\nafter\n")
    pages.rewrite(page, "part", "new\n")
    assert page.read_text() == "before\n<!-- part -->\nnew\n<!-- end of part -->\nafter\n"
    with pytest.raises(ValueError, match="no part"):
        pages.rewrite(page, "other", "new")
