"""Every kernel that a call can launch compiles for every GPU that we name, without one being there.

The compiler needs processes that never saw TRITON_INTERPRET; what it found before comes from Triton's cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from matmix.benchmarks.compiling import HARDWARE, Resources, amdgcn_report, compilation, compiled, problem, ptxas_report
from matmix.benchmarks.resources import NOT_ON_AMD
from matmix.kernels.backend import TRITON_FORMS
from matmix.kernels.launching import blackwell_is_right, launch, record_launches, safe_on

OTHERS = [target for target in HARDWARE if target != "sm_90"]
DTYPES = ("bfloat16", "float16", "float32")


def run(*command: str) -> subprocess.CompletedProcess:
    """A Python process with safe sys.path that can import this file."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, "-P", *command], env=environment, capture_output=True, text=True, timeout=580
    )


def resources_of(tmp_path: Path, op: str, *options: str) -> list[dict]:
    """What `resources` of the kernels' benchmarks finds out about one op's kernels, if all of it is well."""
    out = tmp_path / "resources.json"
    options = ("--only", f"{op}: ", *options, "--workers", "2", "--json", str(out))
    done = run("-m", "matmix.benchmarks", "resources", *options)
    assert out.exists(), done.stdout + done.stderr
    found = json.loads(out.read_text())
    faults = [f"{x['kernel']} on {x['target']}, {x['dtype']}: {fault}" for x in found if (fault := fault_of(x))]
    assert not faults, f"{len(faults)} of {len(found)}:\n" + "\n".join(faults)
    assert done.returncode == 0, done.stdout + done.stderr
    return found


def fault_of(line: dict) -> str:
    """What is wrong with one compiled kernel."""
    hardware = HARDWARE[line["target"]]
    if line["error"]:
        return line["error"]
    if not 0 < line["registers"] <= 512:  # gfx942 has 256 vector and as many accumulation registers, NVIDIA 255
        return f"{line['registers']} registers"
    if line["shared_bytes"] > hardware.shared_memory or line["tensor_memory"] > hardware.tensor_memory:
        return f"{line['shared_bytes']} bytes of shared memory, {line['tensor_memory']} columns of tensor memory"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON_FORMS)
def test_a_sample_fits_sm_90(tmp_path, op):
    """Each kernel in each dtype; the slow tests below compile every configuration, for every GPU."""
    found = resources_of(tmp_path, op, "--scope", "sample", "--target", "sm_90")
    assert {line["dtype"] for line in found} == set(DTYPES)


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON_FORMS)
def test_a_sample_fits_the_other_gpus(tmp_path, op):
    targets = [word for target in OTHERS for word in ("--target", target)]
    found = resources_of(tmp_path, op, "--scope", "sample", *targets)
    if not blackwell_is_right():  # products through tensor memory are not to be trusted
        assert not any(x["tensor_memory"] for x in found if x["target"] == "sm_100")
    kernels = {target: {x["kernel"] for x in found if x["target"] == target} for target in OTHERS}
    assert len(kernels["sm_80"]) >= (1 if op.endswith("_step") else 2), "a forward and a backward pass"
    assert kernels["sm_80"] == kernels["sm_100"] == kernels["gfx942"] | (kernels["sm_80"] & NOT_ON_AMD)


@pytest.mark.slow
@pytest.mark.parametrize("target", HARDWARE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", TRITON_FORMS)
def test_all_that_any_call_launches_fits(tmp_path, op, dtype, target):
    assert resources_of(tmp_path, op, "--only", f", {dtype}", "--scope", "full", "--target", target)


@triton.jit(do_not_specialize=["length"])
def product(x, y, z, length, stride, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    at = row[:, None] * stride + row[None, :]
    a = tl.load(x + at, (row < length)[:, None], other=0.0)
    b = tl.load(y + at, (row < length)[:, None], other=0.0)
    tl.store(z + at, tl.dot(a, b, input_precision=PRECISION), (row < length)[:, None])


def recorded(x=None, y=None, length=100, stride=128, precision="tf32x3", block=32):
    """A launch of `product` on float32 tensors."""
    with record_launches() as launches:
        tensors = [torch.empty(256, 256) if tensor is None else tensor for tensor in (x, y, None)]
        launch(product, (1,), *tensors, length, stride, num_warps=4, PRECISION=precision, BLOCK=block)
    return launches[0]


def print_jobs():
    """Run in a process of its own: what is compiled for launches that differ from the usual one, as JSON."""
    tensor = torch.empty(64, 128)
    launches = {
        "usual": recorded(),
        "another shape": recorded(x=tensor),
        "16 bytes on": recorded(x=tensor[:, 4:]),
        "4 bytes on": recorded(x=tensor[:, 1:]),
        "no memory, 4 bytes on": recorded(x=tensor.to("meta")[:, 1:]),
        "half": recorded(x=tensor.half()),
        "stride 64": recorded(stride=64),
        "stride 100": recorded(stride=100),
        "stride 1": recorded(stride=1),
        "stride 2^40": recorded(stride=1 << 40),
        "length 16": recorded(length=16),
        "length 1": recorded(length=1),
        "block 64": recorded(block=64),
    }
    keys = {name: compilation(found, "sm_90").key for name, found in launches.items()}
    precisions = {target: compilation(recorded(), target).constants["PRECISION"] for target in HARDWARE}
    print(json.dumps({"keys": keys, "precisions": precisions}))


@pytest.mark.slow
def test_arguments_are_specialised_as_triton_does():
    done = run("-c", "import test_compiled; test_compiled.print_jobs()")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    keys = found["keys"]
    once = {name for name, key in keys.items() if key == keys["usual"]}
    assert once == {"usual", "another shape", "16 bytes on", "stride 64", "length 16", "length 1"}
    assert keys["4 bytes on"] == keys["no memory, 4 bytes on"]
    assert len(set(keys.values())) == len(keys) - len(once)
    assert "('constexpr', 1)" in keys["stride 1"]
    assert "'i64'" in keys["stride 2^40"]
    # AMD's matrix cores have no tf32x3 and need none.
    assert found["precisions"] == {"sm_80": "tf32x3", "sm_90": "tf32x3", "sm_100": "tf32x3", "gfx942": "ieee"}


def print_products():
    """Run in a process of its own: what products take of each GPU, as JSON."""
    wrong, large = recorded(precision="no such precision"), recorded(block=128)
    jobs = [compilation(x, target) for x in (recorded(), wrong) for target in HARDWARE]
    found = [compiled(job) for job in (*jobs, compilation(large, "sm_90"))]
    print(json.dumps([x._asdict() | {"problem": problem(x)} for x in found]))


@pytest.mark.slow
def test_what_a_compiled_kernel_takes_is_read():
    done = run("-c", "import test_compiled; test_compiled.print_products()")
    assert done.returncode == 0, done.stderr
    *found, large = json.loads(done.stdout)
    fine, wrong = found[: len(HARDWARE)], found[len(HARDWARE) :]
    assert [x["target"] for x in fine] == [x["target"] for x in wrong] == list(HARDWARE)
    for small in fine:
        assert (small["kernel"], small["problem"], small["error"]) == ("product", "", "")
        assert 16 <= small["registers"] <= 255
        assert small["spill_bytes"] == 0
        assert small["shared_bytes"] >= 4 * 32 * 32  # a float32 tile
        assert small["compile_seconds"] > 0
    for none in wrong:
        assert "no such precision" in none["error"]
        assert none["problem"] == none["error"]
    assert large["registers"] == 255
    assert large["spill_bytes"] > 0  # of 128 x 128 numbers on 128 threads
    assert large["problem"] == ""
    assert 4 * 128 * 128 <= large["shared_bytes"] <= HARDWARE["sm_90"].shared_memory


def test_problems_are_named():
    fine = Resources("k", "sm_90", {}, 4, 2, 128, 0, 232_448, 0, 0.1)
    assert problem(fine) == ""
    assert problem(fine._replace(target="sm_80")) == "takes 232,448 bytes of shared memory; 166,912 are there"
    assert problem(fine._replace(target="gfx942", shared_bytes=65_536)) == ""
    assert "65,536 are there" in problem(fine._replace(target="gfx942", shared_bytes=65_537))
    assert "513 columns" in problem(fine._replace(target="sm_100", tensor_memory=513))
    assert problem(fine._replace(spill_bytes=8)) == ""  # costs time, which is counted
    assert problem(fine._replace(error="no such type")) == "no such type"


def test_products_on_blackwell_keep_out_of_tensor_memory(monkeypatch):
    constants = {"PRECISION": "tf32", "BLOCK": 64, "maxnreg": 168}
    monkeypatch.setattr("matmix.kernels.launching.blackwell_is_right", lambda: False)
    assert safe_on(4, constants, blackwell=False) == (4, constants)
    assert safe_on(4, constants, blackwell=True) == (2, {"PRECISION": "tf32", "BLOCK": 64})
    assert safe_on(1, constants, blackwell=True)[0] == 1
    assert safe_on(8, {"BLOCK": 64}, blackwell=True) == (8, {"BLOCK": 64})  # makes no products
    monkeypatch.setattr("matmix.kernels.launching.blackwell_is_right", lambda: True)
    assert safe_on(4, constants, blackwell=True) == (4, constants)


def test_reports_are_parsed_in_full():
    log = (
        "4 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\nptxas info    : Used 72 registers, used 1\n"
    )
    assert ptxas_report(log) == {"registers": 72, "spill_bytes": 32}
    with pytest.raises(ValueError, match="did not say"):
        ptxas_report("ptxas info    : 0 bytes gmem")
    assembly = "  - .agpr_count:     4\n    .sgpr_count:     18\n    .vgpr_count:     40\n    .vgpr_spill_count: 3\n"
    assert amdgcn_report(assembly) == {"registers": 40, "spill_bytes": 12}
