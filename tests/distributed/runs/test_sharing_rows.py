"""Ranks that share the rows of a micro-batch train and measure as ranks with whole rows do, and go on from where these
stopped."""

import pytest
import run_scenarios
import scenarios
import torch
from harness import run_distributed
from runs import records, weights

CAUSAL = ["--model.layers", "semiseparable", "attention", "--model.mixers.attention.nheads", "2"]
CAUSAL += ["--model.mixers.semiseparable.headdim", "16", "--model.mixers.semiseparable.d-state", "8"]
LION = ["--model.layers", "lion_s", "lion_d", "lion_lit", "--model.n-layers", "3"]
LION += [word for name in ("s", "d", "lit") for word in (f"--model.mixers.lion_{name}.headdim", "16")]
GENERATED = ["--data.packing", "rows", "--data.path", "", "--data.synthetic.task", "mqar"]
GENERATED += ["--data.synthetic.items", "3", "--data.synthetic.validation-samples", "13"]
LONG = ["--model.n-layers", "2", "--model.d-model", "32", "--model.vocab-size", "320"]
LONG += ["--model.mixers.hydra.d-state", "8", "--model.mixers.hydra.headdim", "16", "--data.seqlen", "256"]
LONG += ["--data.workers", "0", "--global-batch-size", "4", "--engine.precision", "fp32", "--evaluation.batches", "1"]
LONG += ["--logging.every", "1", "--logging.tensorboard", "False", "--logging.picture", "False"]
DOCUMENTS, ROWS = (["--data.packing", packing] for packing in ("document", "rows"))
EMA, POSITIONS = ["--ema.decay", "0.9"], ["--model.position-embeddings", "True"]
RUNS = {
    "hydra and attention": ("debug_hydra", EMA),
    "hydra, documents": ("debug_hydra", [*DOCUMENTS, *POSITIONS]),
    "hydra, rows": ("debug_hydra", ROWS),
    "lion": ("debug_hydra", LION),
    "diffusion": ("debug_hydra", ["--objective.name", "masked_diffusion"]),
    "mru": ("debug_mru", []),
    "hydra_long": ("hydra_long", LONG),
    "causal": ("debug_mru", CAUSAL),
    "causal documents": ("debug_mru", [*CAUSAL, *DOCUMENTS]),
    "generated": ("debug_mru", [*CAUSAL, *GENERATED]),
}
"""Recipes with packed documents, several micro-batches in a step, and masked or next tokens."""
FSDP2, DDP, HSDP = [], ["--engine.name", "ddp"], ["--engine.replicate", "2"]
CHECKPOINTING = [
    ["--engine.activation-checkpointing", "full"],
    ["--engine.activation-checkpointing", "selective", "--engine.selective-by", "op"],
    ["--engine.activation-checkpointing", "selective"],
    [],
]
COMMON = ["--device", "cpu", "--model.dropout", "0", "--checkpoint.every", "0", "--gc-every", "0"]
COMMON += ["--logging.progress", "False", "--faults.replica-check-every", "3"]
NEVER_THE_SAME = ("goodput/", "ranks/", "tokens_per", "seconds_", "data_wait", "memory", "time", "kind")


@pytest.fixture(scope="module")
def planned(dataset):
    def run(path, name, *options):
        recipe, own = RUNS[name]
        options = ["--data.path", dataset, *own, "--engine.context", "1", "--run-dir", str(path), *options]
        return recipe, [*COMMON, *options]

    return run


@pytest.fixture(scope="module")
def expected(planned, tmp_path_factory):
    """Makes the records of runs of one process, once each."""
    folder, made = tmp_path_factory.mktemp("expected"), {}

    def numbers(name, *options):
        if (name, *options) not in made:
            path = folder / str(len(made))
            scenarios.train_recipes([planned(path, name, *options)])
            made[name, *options] = path
        return made[name, *options]

    return numbers


def assert_same_numbers(path, expected, rel=1e-4):
    """All numbers of training and evaluations, but for those of time and memory."""
    for kind in ("train", "validation"):
        for got, wanted in zip(records(path, kind), records(expected, kind), strict=True):
            assert got.keys() - wanted.keys() <= {key for key in got if key.startswith("ranks/")}
            for key in wanted:
                if not key.startswith(NEVER_THE_SAME):
                    assert got[key] == pytest.approx(wanted[key], rel=rel, abs=1e-5), (path.name, kind, key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "context", "engine", "steps", "names"),
    [
        (4, 2, FSDP2, 4, ["hydra and attention", "causal documents"]),
        (2, 2, FSDP2, 20, list(RUNS)),
        (2, 2, DDP, 8, list(RUNS)),
        (4, 2, FSDP2, 20, list(RUNS)),
        (4, 2, HSDP, 8, list(RUNS)),
        (4, 4, DDP, 8, list(RUNS)),
        (4, 4, FSDP2, 20, list(RUNS)),
    ],
)
def test_numbers_are_those_of_whole_rows(ranks, context, engine, steps, names, planned, expected, tmp_path):
    schedule = ["--steps", str(steps), "--evaluation.every", str(max(steps // 2, 4))]
    runs = []
    for number, name in enumerate(names):
        options = [*schedule, *engine, *CHECKPOINTING[number % 4], "--engine.context", str(context)]
        runs.append(planned(tmp_path / name, name, *options))
    run_distributed(scenarios.train_recipes, ranks, arguments=(runs,), timeout=600)
    for name in names:
        assert_same_numbers(tmp_path / name, expected(name, *schedule))


@pytest.mark.slow
def test_compiled_blocks(planned, expected, tmp_path):
    schedule = ["--steps", "3", "--evaluation.every", "0", "--engine.compile", "True", "--engine.context", "2"]
    names = ("hydra and attention", "mru", "hydra, rows", "causal")
    runs = [planned(tmp_path / name, name, *schedule, *mode) for name, mode in zip(names, CHECKPOINTING, strict=True)]
    run_distributed(run_scenarios.train_compiled, 2, arguments=(runs,), timeout=600, alone=True)
    for name in names:
        assert_same_numbers(tmp_path / name, expected(name, *schedule[:4]))


@pytest.mark.slow
def test_stopped_runs_go_on(planned, expected, tmp_path):
    """On as many ranks bit for bit, with dropout; and from four parts of rows to two and to whole rows."""
    whole, parts, elastic = (tmp_path / name for name in ("whole", "parts", "elastic"))
    name, schedule = "hydra and attention", ["--steps", "4", "--evaluation.every", "2"]

    def steps(path, context, stop, *more):
        options = ["--engine.context", str(context), "--stop-step", str(stop), "--checkpoint.every", "1"]
        return planned(path, name, *schedule, *options, *more)

    dropout = ["--model.dropout", "0.1"]
    run_distributed(scenarios.train_recipes, 4, arguments=([steps(elastic, 4, 1)],))
    runs = [steps(whole, 2, 4, *dropout), steps(parts, 2, 2, *dropout), steps(parts, 2, 4, *dropout)]
    run_distributed(scenarios.train_recipes, 2, arguments=([*runs, steps(elastic, 2, 3)],))
    scenarios.train_recipes([steps(elastic, 1, 4)])
    assert_same_numbers(elastic, expected(name, *schedule))
    assert curve(parts) == curve(whole)
    final = weights(whole)
    for key, tensor in weights(parts).items():
        assert torch.equal(tensor, final[key]), key


def curve(path):
    return [(record["loss"], record["grad_norm"]) for record in records(path)]
