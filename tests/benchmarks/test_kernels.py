import importlib.util
import json

import pytest
import torch

from matmix.benchmarks import peers
from matmix.benchmarks.__main__ import COMMANDS, main
from matmix.benchmarks.cpu import CASES, quasiseparable
from matmix.benchmarks.measure import (
    PASSES,
    Clock,
    both_passes,
    copy_bandwidth,
    largest_error,
    on_leaves,
    quartiles,
)
from matmix.benchmarks.operations import Conv, Norm, Scan, hydra_inputs, hydra_scan
from matmix.benchmarks.peers import compiled_scan, flipped, our_causal, plain_causal
from matmix.benchmarks.report import RESULTS, case_text, slug

PEERS = {
    "scan": {"flipped, mamba-ssm (published)": "mamba-ssm", "flipped, flash-linear-attention": "fla-core"},
    "conv": {"causal_conv1d": "causal-conv1d"},
    "norm": {"mamba-ssm (published)": "mamba-ssm", "flash-linear-attention": "fla-core"},
    "layer": {"published way (mamba-ssm)": "mamba-ssm"},
    "mru": {},
    "encoder": {},
    "language_model": {},
}
LABELS = {
    "scan": "length 48, batch 2",
    "conv": "length 48, batch 2",
    "norm": "48 rows of 128",
    "mru": "length 48, batch 2",
}
WITH_SMALL = ("scan", "layer", "mru")


def sizes(command: str, width: int) -> list[str]:
    """The words that make a command's models and layers small."""
    if command == "mru":
        return ["--sizes", "4x2"]
    layers = ["--layers", "1"] if command in ("encoder", "language_model") else []
    return ["--d-model", str(width), *layers]


SMALL = {"device": "cpu", "dtype": "float32", "tokens": 96, "d_model": 64, "rounds": 2, "compile": False}


@pytest.fixture
def no_peers(monkeypatch):
    """As on a machine where none of the peers is installed."""
    find = importlib.util.find_spec
    absent = ("mamba_ssm", "causal_conv1d", "fla")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name in absent else find(name))


@pytest.mark.slow
@pytest.mark.parametrize("command", PEERS)
def test_a_command_measures_prints_writes_and_draws(command, no_peers, tmp_path, capsys):
    out = tmp_path / "found.json"
    words = f"{command} --device cpu --tokens 96 --lengths 48,96 --dtype float32 --rounds 2 --no-compile"
    assert main([*words.split(), *sizes(command, 64), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    table = capsys.readouterr().out
    assert {case["seqlen"] for case in record["cases"]} == {48, 96}
    for key in ("date", "processor", "torch", "commit", "device", "dtype", "versions"):
        assert key in record["environment"]
    for case in record["cases"]:
        assert case["label"] in table
        by_name = {found["candidate"]: found for found in case["candidates"]}
        for name, distribution in PEERS[command].items():
            if name in by_name or command != "conv":
                assert by_name.pop(name)["status"] == f"not installed: {peers.HOW[distribution]}"
                assert f"not installed: {peers.HOW[distribution]}" in table
        assert len(by_name) >= 2
        for name, found in by_name.items():
            assert found["status"] == "ok", found
            assert f"  {name} " in table
            for run in PASSES:
                spread = found["seconds"][run]
                assert 0 < spread["low"] <= spread["median"] <= spread["high"]
                if command in LABELS:
                    assert found["floor_bytes"][run] > 0
                    least = found["floor_bytes"][run] / record["copy_bandwidth"]
                    assert found["over_floor"][run] == pytest.approx(spread["median"] / least)
                else:
                    assert found["tokens_per_second"][run] == pytest.approx(96 / spread["median"])
            if found["compared"] and name != "ours":
                assert found["error"] < 1e-4
                assert found["agrees"]
    if command in LABELS:
        assert record["cases"][0]["label"] == LABELS[command]
    if command in WITH_SMALL:
        assert record["small"]["candidates"][0]["one_by_one"] > 0
    image = out.with_suffix(".png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 20_000
    assert "DIFFERS" not in table


@pytest.mark.slow
def test_the_cpu_command_compares_time_and_memory(tmp_path, capsys):
    out = tmp_path / "cpu.json"
    assert main(["cpu", "--only", "gated norm", "--rounds", "1", "--threads", "1", "--out", str(out)]) == 0
    ((title, found),) = json.loads(out.read_text())["cases"].items()
    assert title in capsys.readouterr().out
    assert set(found) == {"ours", "rms_norm * silu", "rms_norm * silu compiled"}
    assert all(one["seconds"] > 0 and one["peak_bytes"] > 0 for one in found.values())


def test_every_command_leads_somewhere():
    for command in COMMANDS.values():
        module, _, function = command.partition(":")
        assert callable(getattr(importlib.import_module(f"matmix.benchmarks.{module}"), function).run)


def test_without_a_gpu_a_command_ends_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["scan"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no GPU" in line
    assert "--device cpu" in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["scam"], "scam"),
        (["scan", "--device", "cpu", "--lengths", "12,x"], "12,x"),
        (["conv", "--device", "cpu", "--lengths", "0"], "--lengths 0"),
        (["norm", "--device", "cpu", "--tokens", "0"], "--tokens 0"),
        (["layer", "--device", "cpu", "--d-model", "100"], "--d-model 100"),
        (["encoder", "--device", "cpu", "--layers", "0"], "--layers 0"),
        (["scan", "--device", "gpu"], "--device gpu"),
        (["mru", "--device", "cpu", "--sizes", "8x6,16"], "--sizes 8x6,16"),
        (["mru", "--device", "cpu", "--sizes", "7x6"], "--sizes 7x6"),
        (["language_model", "--device", "cpu", "--dtype", "float16"], "'float16' for argument '--dtype'"),
    ],
)
def test_bad_arguments_are_one_line(words, named, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_floors_are_the_bytes_counted_by_hand():
    sizes = {**SMALL, "d_model": 768, "dtype": "bfloat16", "tokens": 10}
    candidates = Scan(**sizes).case(5).candidates
    # Per token: v and y 24 * 64 * 2 bytes, four vectors of 64 * 2, two step sizes and a diagonal of 24 * 4; once, the
    # decay rates, 24 * 4.
    values, rest, decay = 3072, 4 * 128 + 3 * 96, 96
    forward, backward = 10 * (2 * values + rest) + decay, 10 * (3 * values + 2 * rest) + 2 * decay
    assert candidates[0].floor == {"forward": forward, "backward": backward, "both": forward + backward}
    assert (forward, backward) == (10 * 6944 + 96, 10 * 10816 + 192)
    attention = candidates[-1].floor
    assert (attention["forward"], attention["backward"]) == (10 * 4 * 1536, 10 * 7 * 1536)
    conv, weights = Conv(**sizes).case(5, False).candidates[0].floor, 1792 * 8 * 2
    assert (conv["forward"], conv["backward"]) == (10 * 2 * 3584 + weights, 10 * 3 * 3584 + 2 * weights)
    norm = Norm(**sizes).case(10).candidates[0].floor
    assert (norm["forward"], norm["backward"]) == (10 * 3 * 3072 + 3072, 10 * 5 * 3072 + 2 * 3072)


@pytest.mark.parametrize("causal", [our_causal, plain_causal])
@pytest.mark.parametrize("groups", [1, 2])
def test_flipped_scans_are_the_bidirectional_scan(causal, groups):
    v, q, k = torch.randn(2, 137, 4, 8), *torch.randn(2, 2, 137, groups, 16).unbind(0)
    others = torch.randn(2, 2, 137, groups, 16).unbind(0)
    steps, decay = torch.rand(2, 2, 137, 4).unbind(0), -0.5 - torch.rand(4)
    inputs = [x.double().requires_grad_() for x in (v, q, k, *others, *steps, decay, torch.randn(2, 137, 4))]
    cotangent = torch.randn(2, 137, 4, 8, dtype=torch.float64)
    wanted = both_passes(on_leaves("ours", hydra_scan, inputs, cotangent))
    got = both_passes(on_leaves("flipped", flipped(causal), inputs, cotangent))
    assert largest_error(got, wanted) < 1e-12


def test_the_cpu_case_holds_the_same_numbers_in_every_form():
    candidates = quasiseparable(seqlen=70, batch=1, heads=2, width=16)
    wanted = candidates["ours"]()
    for name in ("flipped, our causal", "flipped, plain SSD", "recurrence"):
        got = candidates[name]()
        # dv and the gradients of the four vectors; step sizes and log-decays are cut differently.
        assert largest_error(got[:5], wanted[:5]) < 1e-5, name
        assert largest_error(got[-1:], wanted[-1:]) < 1e-5, name


@pytest.mark.slow
def test_the_compiled_form_is_the_scan():
    leaves, cotangent = hydra_inputs(1, 130, Scan(**SMALL))
    wanted = both_passes(on_leaves("ours", hydra_scan, leaves, cotangent))
    got = both_passes(on_leaves("compiled", compiled_scan(), leaves, cotangent))
    assert largest_error(got, wanted) < 1e-5


def test_what_a_peer_runs_into_is_said_and_what_it_gets_wrong_is_marked():
    x = torch.randn(4, requires_grad=True)

    def raising(error):
        def op(x):
            raise error

        return op

    candidates = [
        on_leaves("ours", lambda x: 2 * x, [x], torch.ones(4)),
        on_leaves("same", lambda x: x + x, [x], torch.ones(4)),
        on_leaves("wrong", lambda x: 3 * x, [x], torch.ones(4)),
        on_leaves("wrong gradient", lambda x: 2 * x.detach() + 0 * x, [x], torch.ones(4)),
        on_leaves("NaN", lambda x: 2 * x + torch.nan, [x], torch.ones(4)),
        on_leaves("other", lambda x: 3 * x, [x], torch.ones(4), compared=False),
        on_leaves("large", raising(torch.OutOfMemoryError("no")), [x], torch.ones(4)),
        on_leaves("broken", raising(RuntimeError("not for width 4\nand more")), [x], torch.ones(4)),
        on_leaves("absent", raising(peers.Missing("not installed: pip install it")), [x], torch.ones(4)),
    ]
    options = Scan(**SMALL)
    record = options.measured(options.case_of(4, candidates), Clock(torch.device("cpu")), 1e9)
    text = case_text(record).splitlines()
    lines = {c.name: next(line for line in text if line.startswith(f"  {c.name}  ")) for c in candidates}
    differing = {name for name, line in lines.items() if "DIFFERS" in line}
    assert differing == {"wrong", "wrong gradient", "NaN"}
    assert "out of memory" in lines["large"]
    assert "failed: not for width 4" in lines["broken"]
    assert "not installed" in lines["absent"]
    assert record["candidates"][0]["over_ours"]["both"] == 1


def test_ours_may_not_fail():
    def op():
        raise RuntimeError("broken")

    options = Scan(**SMALL)
    case = options.case_of(1, [on_leaves("ours", op, [], torch.ones(1))])
    with pytest.raises(RuntimeError, match="broken"):
        options.measured(case, Clock(torch.device("cpu")), 1e9)


def test_a_peer_that_is_there_is_found_past_its_compiled_parts(tmp_path, monkeypatch):
    for name, opening in {"mamba_ssm": "import an_extension_nobody_has", "fla": "import newer_than_ours"}.items():
        (tmp_path / name / "ops").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text(opening)
        (tmp_path / name / "ops" / "__init__.py").write_text("")
        (tmp_path / name / "ops" / "scan.py").write_text("def scan():\n    return 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.scan", "fla"):
        monkeypatch.delitem(peers.sys.modules, name, raising=False)
    assert peers.peer("mamba-ssm", "mamba_ssm.ops.scan", "scan")() == 5
    for name in [key for key in peers.sys.modules if key.startswith("mamba_ssm")]:
        monkeypatch.delitem(peers.sys.modules, name)
    with pytest.raises(peers.Missing, match="fla-core cannot be imported"):
        peers.peer("fla-core", "fla.ops.scan", "scan")


def test_quartiles_and_bandwidth():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert quartiles([2.0]) == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert copy_bandwidth(Clock(torch.device("cpu")), 1 << 20, 3) > 1e7
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures on a GPU")
@pytest.mark.parametrize("command", list(PEERS))
def test_a_command_runs_on_a_gpu(command, tmp_path):
    out = tmp_path / "found.json"
    words = f"{command} --tokens 4096 --lengths 128,1024 --rounds 3 --no-compile"
    assert main([*words.split(), *sizes(command, 128), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    for case in record["cases"]:
        for found in case["candidates"]:
            assert found["status"] == "ok" or "installed" in found["status"] or "imported" in found["status"], found
            assert found.get("agrees", True), found
    for found in record.get("small", {}).get("candidates", []):
        assert "one_by_one" not in found or found["graph_over_kernels"] > 0


def test_the_committed_record_has_every_case():
    assert set(json.loads((RESULTS / "cpu.json").read_text())["cases"]) == set(CASES)
