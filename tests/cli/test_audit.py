import html.parser
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import plait
from plait.audit import Collective, Operation, Report, proto, topologies
from plait.cli import main
from plait.cli.figures import FIGURES, table
from plait.cli.page import page
from plait.cli.variants import MOVES

pytest.importorskip("google.protobuf")

SMALL = ["audit", "--topology", "cpu:8", "--shape", "1,64,1,4", "--dtype", "float32"]

MODEL = (
    """
import absent_elsewhere
""",
    """
import functools

import jax
from jax.sharding import PartitionSpec as P

answer = 42


def shift(x, w):
    move = functools.partial(jax.lax.ppermute, axis_name="context", perm=[(0, 1), (1, 0)])

    @functools.partial(jax.shard_map, in_specs=P("context"), out_specs=P("context"))
    def both(x):
        return move(move(x) * x)  # line 15

    return both(x) + w


jitted = jax.jit(shift)


class Model:
    def forward(x):
        return x @ x.T


def nothing():
    return jax.numpy.ones(4)


def named(x, *, y):
    return x + y


bound = functools.partial(named, y=1)


def until(x):
    return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x * x[::-1], x)
""",
)


def run(capsys, *arguments):
    """(status, stdout, stderr) of a call."""
    status = main(arguments)
    return status, *capsys.readouterr()


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The current folder, with modules of a user in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in zip(("audited_broken", "audited"), MODEL, strict=True):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


SHIFT = ["audited:shift", "--shape", "8,4"]
ONE = ["audited:Model.forward", "--shape", "8,4"]
TWICE = [*SHIFT, "--shape", "8,4"]


@pytest.mark.parametrize(
    ("arguments", "given", "works"),
    [
        (["--topology", "v5q:4x4x8"], "'v5q:4x4x8'", "v5p:4x4x8"),
        (["--topology", "v5p:4x4"], "'4x4'", "such as v5p:4x4x8"),
        (["--topology", "cpu:0"], "--topology is 'cpu:0'", "cpu:8 works"),
        (["--topology", "cpu:many"], "--topology is 'cpu:many'", "cpu:8 works"),
        (["--topology", "cpu:9"], "'cpu:9' is not here", "cpu:1 to cpu:8"),
        (["--shape", "1,64,x"], "--shape is '1,64,x'", "1,131072,1,576 works"),
        (["--shape", "-1"], "--shape is '-1'", "1,131072,1,576 works"),
        (["--shape", ""], "--shape is ''", "1,131072,1,576 works"),
        (["--shape", "1,1000,2"], "--shape is 1,1000,2; Zigzag(8)", "1,1008,2 works"),
        (["--shape", "1,0"], "--shape is 1,0; Zigzag(8)", "1,16 works"),
        (["--shape", "1,8", "--layout", "striped,zigzag"], "multiple of 16", "1,16 works"),
        (["--shape", "1,64", "--shape", "1,64"], "--shape is given 2 times", "1,64 works"),
        (["--dtype", "bf16"], "--dtype is 'bf16'", "int32: bfloat16 works"),
        (["--dtype", "f32"], "--dtype is 'f32'", "int32: float32 works"),
        (["--dtype", "u8"], "--dtype is 'u8'", "int32: uint8 works"),
        (["--dtype", "float64"], "--dtype is 'float64'", "bfloat16 works"),
        (["--ranks", "9"], "--ranks 9 takes 9 devices and cpu:8 has 8", "--ranks 8 works"),
        (["--ranks", "0"], "--ranks is 0", "8 works"),
        (["--turns", "-1"], "--turns is -1", "1 works"),
        (["--axis", "4"], "--axis is 4", "3 works"),
        (["--axis", "last"], "--axis is 'last'", "1 works"),
        (["--layout", "zigzig"], "--layout is 'zigzig'", "zigzag works"),
        (["--move", "all-gather"], "--move is 'all-gather'", "reorder works"),
        (["--mesh", "context=8"], "--mesh is given", "model:forward"),
        (["--html", "/dev/null/here.html"], "--html is '/dev/null/here.html'", "audit.html works"),
        (["--json", "."], "--json is '.'", "audit.json works"),
        (["audited", "--shape", "8"], "'audited'", "model:forward"),
        (
            ["audited.py:shift", "--shape", "8"],
            "'audited.py:shift'",
            "audited:shift works, without",
        ),
        (["audited:named", "--shape", "8"], "takes 'y' by name alone", "partial(named, y=...)"),
        (["audited:nothing", "--shape", "8"], "for 1 arguments", "leaving --shape out works"),
        (["audited:shift"], "needs the --shape", "--shape 1,131072,1,576 works"),
        (["audite:shift", "--shape", "8"], "no module 'audite'", "dots for slashes"),
        (["audited:shft", "--shape", "8"], "no function 'shft'", "audited:shift works"),
        (["audited:answer", "--shape", "8"], "answer is no function but of type int", "works"),
        (SHIFT, "for 1 arguments", "--shape 2 times, in their order, works"),
        ([*ONE, "--mesh", "a=3", "--out-spec", "a"], "--out-spec does not fit", "(9, 8) works"),
        ([*ONE, *["--out-spec", "context"] * 2], "--out-spec does not fit", "one PartitionSpec"),
        ([*TWICE, "--dtype", "int8", "--dtype", "int8", "--dtype", "int8"], "3 times", "2 times"),
        ([*TWICE, "--spec", ",contxt"], "names 'contxt'", "'context' works"),
        ([*TWICE, "--spec", "context,context"], "names 'context' twice", "'context' works"),
        ([*TWICE, "--spec", ",context"], "--shape is 8,4; axis 1", "8,8 works"),
        ([*TWICE, "--spec", ",,context"], "names 3 dimensions", "has 2"),
        ([*TWICE, "--mesh", "a=2,b"], "--mesh is 'a=2,b'", "context=8 works"),
        ([*TWICE, "--mesh", "a=4,b=4"], "--mesh a=4,b=4 takes 16", "--mesh a=8 works"),
        ([*TWICE, "--mesh", "a=4", "--ranks", "4"], "--mesh is 'a=4'", "context=4 works"),
        ([*TWICE, "--layout", "zigzag"], "--layout is given", "leave MODULE:FUNCTION out"),
        (["audited:jitted", *TWICE[1:], "--out-spec", "context"], "--out-spec", "out_shardings"),
    ],
)
def test_a_bad_value_gets_one_line_with_a_value_that_works(capsys, folder, arguments, given, works):
    before = sorted(folder.iterdir())
    given_topology = [] if "--topology" in arguments else ["--topology", "cpu:8"]
    status, out, err = run(capsys, "audit", *given_topology, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("plait audit: ")
    assert err.count("\n") == 1, err
    assert given in err
    assert works in err
    assert sorted(folder.iterdir()) == before


def test_a_missing_compiler_names_the_extra_and_what_works_without(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    status, out, err = run(capsys, "audit")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("plait audit: compiling for v5p needs ")
    assert "cpu:8 works without" in err


def test_a_missing_reader_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(proto, "_module_class", proto._module_class.__wrapped__)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    status, out, err = run(capsys, *SMALL, "--move", "reorder", "--layout", "half-swap")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "needs protobuf" in err
    assert "plait[audit]" in err


def test_a_program_that_does_not_compile_gets_one_line(capsys, monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore\nlines")

    monkeypatch.setattr("plait.cli.audit.compile_for", refuse)
    status, out, err = run(capsys, *SMALL)
    assert (status, out) == (2, "")
    assert err == (
        "plait audit: zigzag reorder does not compile for cpu:8, the compiler says: "
        "RESOURCE_EXHAUSTED: out of memory\n"
    )


def test_what_a_users_module_lacks_is_not_taken_for_the_module(capsys, folder):
    with pytest.raises(ModuleNotFoundError, match="absent_elsewhere"):
        run(capsys, *SMALL[:3], "audited_broken:f", "--shape", "8")


def test_every_topology_is_listed(capsys):
    status, out, err = run(capsys, "audit", "--list")
    assert (status, err) == (0, "")
    for name in topologies():
        assert f"  {name}" in out


# One shard is 8 tokens of 16 bytes.
BY_HAND = {
    "zigzag reorder": ({"collective-permute": 2}, 128, 128),
    "zigzag restore": ({"collective-permute": 2}, 128, 128),
    # The shard restored, then 7/8 of 64 tokens gathered, of which the floor is the gather alone.
    "zigzag all_gather": ({"collective-permute": 2, "all-gather": 1}, 128 + 896, 896),
    "zigzag jnp.take": (None, None, 128),
    "half-swap reorder": ({"collective-permute": 1}, 64, 64),
    "half-swap restore": ({"collective-permute": 1}, 64, 64),
    # One token of eight stays; the all-to-all of 8 sends 7/8 of a shard.
    "striped reorder": ({"all-to-all": 1}, 112, 112),
    "striped restore": ({"all-to-all": 1}, 112, 112),
}


def test_the_moves_stand_side_by_side(capsys, folder):
    status, out, err = run(capsys, *SMALL, "--json", "to/a.json", "--html", "to/a.html")
    assert (status, err) == (0, "")
    numbers = json.loads((folder / "to" / "a.json").read_text())
    assert list(numbers["programs"]) == list(BY_HAND)
    for name, (kinds, traffic, floor) in BY_HAND.items():
        program = numbers["programs"][name]
        found = {}
        for collective in program["collectives"]:
            found[collective["kind"]] = found.get(collective["kind"], 0) + 1
        assert program["network_floor_bytes"] == floor, name
        if kinds is not None:
            assert (found, program["traffic_bytes"]) == (kinds, traffic), name
        assert any(line.startswith(f"{name}  ") for line in out.splitlines()), out
    everywhere = numbers["programs"]["zigzag all_gather"]
    assert everywhere["floor_bytes"] == 128 + 1024
    assert everywhere["stages"] == 2
    assert numbers["programs"]["zigzag jnp.take"]["traffic_bytes"] > 128
    assert numbers["versions"]["jax"] == jax.__version__
    assert numbers["options"] == {
        "function": None,
        "topology": "cpu:8",
        "mesh": {"context": 8},
        "shapes": [[1, 64, 1, 4]],
        "dtypes": ["float32"],
        "axis": 1,
        "specs": None,
        "out_specs": None,
        "turns": 1,
    }
    assert "compiler's" not in out.split("static")[0], "an estimate, and no TPU"
    check_page((folder / "to" / "a.html").read_text(), list(BY_HAND))


def test_moves_that_are_named_are_those_of_every_layout(capsys):
    choose = ["--move", "all_gather", "--layout", "half-swap", "--layout", "contiguous,striped"]
    status, out, _ = run(capsys, *SMALL, *choose, "--axis", "-3", "--ranks", "2", "--json", "-")
    assert status == 0
    numbers = json.loads(out)
    names = ["half-swap all_gather", "contiguous all_gather", "striped all_gather"]
    assert list(numbers["programs"]) == names
    assert numbers["options"]["mesh"] == {"context": 2}
    assert {p["network_floor_bytes"] for p in numbers["programs"].values()} == {512}


def test_every_move_may_be_named(capsys):
    for name in MOVES:
        status, out, _ = run(capsys, *SMALL, "--move", name, "--layout", "zigzag", "--json", "-")
        assert (status, list(json.loads(out)["programs"])) == (0, [f"zigzag {name}"])


def test_a_function_of_ones_own(capsys, folder):
    on_two = ["--ranks", "2", "--spec", "context", "--spec", "", "--dtype", "float32"]
    at = ["audit", "--topology", "cpu:8", *TWICE]
    status, out, err = run(capsys, *at, *on_two, "--json", "a.json", "--html", "a.html")
    assert (status, err) == (0, "")
    program = json.loads((folder / "a.json").read_text())["programs"]["audited:shift"]
    # Half of [8, 4] float32 is 64 bytes, sent twice, the second time behind the first.
    found = [(c["kind"], c["bytes"], c["stage"]) for c in program["collectives"]]
    assert found == [("collective-permute", 64, 1), ("collective-permute", 64, 2)]
    assert program["argument_bytes"] == 64 + 128
    assert program["network_floor_bytes"] is None
    assert "traffic\n" not in out
    line = next(line for line in out.splitlines() if line.startswith("    2  collective-permute"))
    assert line.endswith("  audited.py:15"), out
    text = (folder / "a.html").read_text()
    check_page(text, ["audited:shift"])
    assert "audited.py:15" in text


def test_a_function_on_one_device_and_one_of_a_class(capsys, folder):
    at = ["audit", "--topology", "cpu:8", "--json", "-", "--dtype", "int8", "--shape", "8,4"]
    _, out, _ = run(capsys, *at, "audited:Model.forward")
    numbers = json.loads(out)
    assert numbers["options"]["mesh"] is None
    assert numbers["programs"]["audited:Model.forward"]["floor_bytes"] == 32 + 64


def test_a_function_without_arguments_and_one_that_is_bound(capsys, folder):
    at = ["audit", "--topology", "cpu:8"]
    status, out, _ = run(capsys, *at, "audited:nothing")
    assert status == 0
    assert "audited:nothing compiled for cpu:8: no arguments, on one device" in out
    status, out, _ = run(capsys, *at, "audited:bound", "--shape", "8")
    assert status == 0


def test_loops_of_unknown_length_take_the_turns_that_are_given(capsys, folder):
    at = ["audit", "--topology", "cpu:8", "--json", "-", "--shape", "64"]
    counted = []
    for turns in ("1", "2", "12"):
        _, out, _ = run(capsys, *at, "audited:until", "--turns", turns)
        (program,) = json.loads(out)["programs"].values()
        counted.append(program["counted_bytes"])
    assert counted[2] - counted[1] == 10 * (counted[1] - counted[0]) > 0


def test_specs_name_axes_of_the_mesh(capsys, folder):
    at = ["audit", "--topology", "cpu:8", "--json", "-", "--dtype", "int8", "--shape", "8,4"]
    over = ["--mesh", "data=2,model=2", "--spec", "data+model", "--out-spec", "data,model"]
    _, out, _ = run(capsys, *at, "audited:Model.forward", *over)
    (program,) = json.loads(out)["programs"].values()
    assert (program["argument_bytes"], program["output_bytes"]) == (8, 16)


@pytest.mark.parametrize("topology", ["cpu:4", "cpu"])
def test_devices_are_made_where_jax_has_not_started(tmp_path, topology):
    package = str(pathlib.Path(plait.__file__).parents[1])
    variables = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "", "PYTHONPATH": package}
    command = ["--topology", topology, "--shape", "64,2", "--axis", "0", "--layout", "zigzag"]
    count = [] if topology == "cpu:4" else ["--ranks", "4"]
    result = subprocess.run(
        [sys.executable, "-m", "plait.cli", "audit", *command, *count, "--move", "reorder"],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "compiled for cpu:4: [64, 2] bfloat16, over context=4" in result.stdout


@pytest.mark.parametrize("arguments", [["--topology", "local"], ["--topology", "cpu"]])
def test_the_benchmarks_leave_other_commands_their_devices(capsys, monkeypatch, arguments):
    for name in ("XLA_FLAGS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        monkeypatch.delenv(name, raising=False)
    status, _, _ = run(capsys, "audit", *arguments, "--shape", "1,64", "--layout", "zigzig")
    assert status == 2
    assert "XLA_FLAGS" not in os.environ
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ


def test_a_tpu_program_has_an_estimate_that_is_called_one(capsys):
    pytest.importorskip("libtpu")
    at = ["audit", "--topology", "v5e:2x4", "--shape", "1,1024,1,128", "--layout", "half-swap"]
    status, out, err = run(capsys, *at, "--move", "restore")
    assert (status, err) == (0, "")
    assert "compiler's\n" in re.sub(" *\n", "\n", out)
    assert "estimate" in out
    row = next(line for line in out.splitlines() if line.startswith("half-swap restore"))
    assert "1 collective-permute" in row
    assert out.rstrip().endswith("Pallas calls."), out


def report(name="copy", hbm_bytes=500, collectives=(), stages=0):
    operations = (
        Operation("fusion", "fusion.1", 3, 100, 0, "made by the compiler"),
        Operation(name, f"{name}.1", 1, 100, 0, "made by the compiler"),
    )
    return Report("cpu", operations, collectives, stages, hbm_bytes, 400, 150, 50, 7, 0)


def widths(text):
    """The width of each bar's part, by kind."""
    found = re.findall(r'width="([\d.]+)" height="22" [^>]*><title>([^:]*):', text)
    return {kind: float(width) for width, kind in found}


def test_parts_of_a_bar_are_as_long_as_their_bytes():
    text = page("t", "d", {}, {"one": report()})
    # Of 760 units 1.04 times 500 bytes, which is the longest bar, take all.
    unit = 760 / (1.04 * 500)
    wanted = {"fusion": 300, "copy": 100, "counted by the compiler alone": 100}
    assert widths(text) == pytest.approx({k: v * unit for k, v in wanted.items()}, abs=0.1)
    floor = float(re.search(r'class="floor" d="M([\d.]+) ', text)[1])
    assert floor == pytest.approx(200 * unit, abs=0.1)
    assert 'class="cut"' not in text


def test_a_bar_much_longer_than_the_others_is_cut():
    text = page("t", "d", {}, {"one": report(), "far": report(hbm_bytes=5000)})
    one, far = text.split(">0.00500 MB, 25.0x<")[0].split("&lt;0.001 MB, 2.5x<")
    assert "cut" not in one.split("</style>")[1]
    assert far.count('class="cut"') == 2  # both edges of one mark
    # It fills the room there is, with its parts in proportion.
    wanted = {"fusion": 300, "copy": 100, "counted by the compiler alone": 4600}
    wanted = {kind: 760 * count / 5000 for kind, count in wanted.items()}
    assert widths(far) == pytest.approx(wanted, abs=0.1)


def test_nothing_on_a_page_is_markup_but_the_pages_own():
    nasty = "<b onload='x'>&\"</b>"
    collectives = [Collective(nasty, nasty, 10, 10, 2, 1, 3, nasty)] * 20
    one = report(nasty, collectives=tuple(collectives), stages=9)
    text = page(nasty, nasty, {nasty: nasty}, {nasty: one})
    assert "<b onload" not in text
    assert "onload='" not in text
    check_page(text, [])
    assert "and 12 more" in text
    assert "9 serial stages" in text


def test_a_program_without_arguments_results_and_collectives_has_a_page():
    empty = Report("cpu", (), (), 0, 0, 0, 0, 0, 0, 0)
    text = page("t", "d", {}, {"empty": empty})
    check_page(text, ["empty"])
    assert "nothing leaves a device" in text
    assert "nan" not in text
    assert "nan" not in table(FIGURES, {"empty": empty})


class Reader(html.parser.HTMLParser):
    """Checks that elements nest, and keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def check_page(text, names):
    """A page that stands alone, with a bar, a card and a row for each program."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    for outside in ("http:", "https:", "<script", "<link", "<img", "<iframe", "@import", " src="):
        assert outside not in text, outside
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#unseen"}
    assert "prefers-color-scheme: dark" in text
    assert "Nothing was run" in reader.text
    for name in names:
        assert reader.text.count(name) >= 3, name
