import math

import calibrate


def figures(seconds, hbm, opaque=()):
    return {"seconds": seconds, "hbm_bytes": hbm, "opaque": list(opaque)}


def recording(jax="1.0", **changed):
    """Every program takes 1 ms and a byte but for those that are named, with _ for ", "."""
    names = [
        f"{place}, {tensor}, {form}, {passed}"
        for place in ("local", "sharded", "gather")
        for tensor in calibrate.TENSORS
        for form in (*calibrate.FORMS, *["none"] * (place == "gather"))
        for passed in calibrate.PASSES
    ]
    found = {name: figures(0.001, 1.0) for name in names}
    for name, value in changed.items():
        key = name.replace("_", ", ").replace("chunks", "take of chunks")
        assert key in found
        found[key] = value
    versions = {"jax": jax, "libtpu": "0.1"}
    return {"versions": versions, "permute_seconds": 0.0001, "programs": found}


def test_the_prediction_by_hand():
    slow = figures(0.021, 1)
    recorded = recording(local_K_chunks_forward=slow, local_V_chunks_backward=figures(0.011, 1))
    found = calibrate.saving(recorded, ("local", "take of chunks"), ("local", "strided"))
    assert math.isclose(found["forward"], 0.020)
    assert math.isclose(found["backward"], 0.010)
    assert math.isclose(found["2 passes"], 61 * 0.030)
    assert math.isclose(found["3 passes"], 61 * 0.050)


def test_a_gather_without_an_estimate_may_be_as_slow_as_a_loop():
    """V is two thirds of K, so that its gather may take two thirds of what K's loop takes."""
    recorded = recording(
        local_K_chunks_forward=figures(0.030, 1),
        local_V_chunks_forward=figures(0.002, 1, ["gather_fusion"]),
    )
    key = "local, V, take of chunks, forward"
    assert calibrate.at_least(recorded, key) == 0.002
    assert math.isclose(calibrate.as_loops(recorded, key), 0.020)
    assert calibrate.as_loops(recorded, "local, K, strided, forward") == 0.001


def test_plait_pays_for_its_permutes():
    recorded = recording(gather_K_strided_forward=figures(0.005, 1))
    found = calibrate.plait_saving(recorded)
    assert math.isclose(found["forward"], 0.004 - 0.0001)
    assert math.isclose(found["backward"], -0.0001)
    assert math.isclose(found["2 passes"], 61 * (0.004 - 2 * 0.0001))
    assert math.isclose(found["3 passes"], 61 * (2 * 0.004 - 3 * 0.0001))


def test_the_pages_say_where_compilers_differ():
    one = recording(sharded_K_plait_forward=figures(0.0001, 0.5))
    other = recording("2.0", sharded_K_take_forward=figures(0.0001, 0.5, ["gather"]))
    text = calibrate.comparison([one, other])
    assert "in the same order in 11 of 12 lines, and plait first in " in text
    assert "sharded, K, forward: jax 1.0, libtpu 0.1 has plait, take" in text
    assert "≥ 0.100" in text
    prediction = calibrate.calibration([one, other])
    assert "| measured in the field | 3 | 3 |" in prediction
    assert "jax 2.0, libtpu 0.1, ms, K and V" in prediction


def test_what_is_recorded_is_of_two_compilers():
    records = calibrate.recordings()
    assert len({calibrate.name_of(r) for r in records}) >= 2
    page = (calibrate.pages.DOCS / "calibration.md").read_text()
    assert calibrate.calibration(records) in page
    assert calibrate.comparison(records) in page
