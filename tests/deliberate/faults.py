"""Deliberate faults: each is put into a copy of the code, where the tests that are named with it must fail.

    python tests/deliberate/faults.py               # all of them, a few seconds each
    python tests/deliberate/faults.py end-token     # those whose names contain one of the words

The list shows what the tests that run by day find; docs/deliberate-faults.md is its table. `old` occurs once in its
file, and `new` is code that runs and computes something else.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One change of one file that a test finds."""

    name: str
    """What is wrong then, in a few words."""
    file: str
    """Path from the root."""
    old: str
    new: str
    test: str
    """The test that fails, as pytest takes it, below `tests/`."""


KERNELS = [
    Fault(
        "a scan forgets the decay of the state that enters a chunk",
        "kernels/semiseparable/chunked/setup.py",
        "torch.addcmul(here, total[:, chunk], state, out=spare)",
        "torch.add(here, state, out=spare)",
        "kernels/scan/test_semiseparable.py::test_lengths",
    ),
    Fault(
        "a decay has the wrong sign",
        "kernels/semiseparable/chunked/decay.py",
        "enter, total = rows.exp(), end[:, 0].exp()",
        "enter, total = rows.neg().exp(), end[:, 0].exp()",
        "kernels/scan/test_semiseparable.py::test_decays",
    ),
    Fault(
        "Hydra's shift is missing in the decays",
        "kernels/semiseparable/chunked/decay.py",
        "rows = running.over(steps, own=False) if exclusive else cols",
        "rows = cols",
        "kernels/scan/test_quasiseparable.py::test_lengths",
    ),
    Fault(
        "a scan's state goes on into the next packed document",
        "kernels/semiseparable/chunked/decay.py",
        "enter.mul_((layout.documents == entry[:, None])[..., None])",
        "pass",
        "kernels/scan/test_semiseparable.py::test_packed_documents",
    ),
    Fault(
        "the short convolution sees the token to come",
        "kernels/short_conv/parts.py",
        "return width - 1 if self.causal else width // 2",
        "return width // 2",
        "kernels/test_small_ops.py::test_conv",
    ),
    Fault(
        "the interpreted convolution reads over the end of a document",
        "kernels/short_conv/fused.py",
        "inside = (at >= 0) & (at < length)",
        "inside = at >= 0",
        "kernels/test_small_ops_triton.py::test_conv_of_packed_documents",
    ),
    Fault(
        "the gradient of a gate lacks a term",
        "kernels/gated_norm/chunked.py",
        "dgate[at] = grad * flat * wide * sigmoid * (1 + g * (1 - sigmoid))",
        "dgate[at] = grad * flat * wide * sigmoid * (1 + g)",
        "kernels/test_small_ops.py::test_gated_norm",
    ),
    Fault(
        "the gradient of the MRU's Cayley transform has the wrong sign",
        "kernels/mru/chunked.py",
        "dx = CayleyTransform.gradient(x, dx)",
        "dx = -CayleyTransform.gradient(x, dx)",
        "kernels/mru/test_mru_mixer.py::test_gradcheck",
    ),
    Fault(
        "LION's features grow exponentially",
        "kernels/lion/chunked.py",
        "return x.relu() + x.clamp(max=0).exp()",
        "return x.relu() + x.exp()",
        "model/mixers/test_lion.py::test_golden_layers",
    ),
]

MODELS = [
    Fault(
        "rotary positions begin at 0 again in each piece of a text",
        "model/mixers/attention/softmax_attention.py",
        "self.project(x, torch.arange(past, past + new, device=x.device))",
        "self.project(x, torch.arange(new, device=x.device))",
        "model/mixers/test_mixers.py::test_steps_and_pieces_equal_the_parallel_form",
    ),
    Fault(
        "position embeddings go on in the next packed document",
        "model/positions.py",
        "return positions - torch.repeat_interleave(starts, lengths, output_size=length)",
        "return positions",
        "model/test_models.py::test_positions_begin_again_in_each_document",
    ),
    Fault(
        "the MRU blends the first token of a document with the last of the one before",
        "model/mixers/mru.py",
        "shift_right(x, cu_seqlens, self.context)",
        "shift_right(x, None, self.context)",
        "model/mixers/test_mixers.py::test_packed_documents_are_mixed_one_by_one",
    ),
    Fault(
        "a norm over positions is over all documents of a row",
        "model/norms.py",
        "return norm(x, cu_seqlens) if",
        "return norm(x) if",
        "model/test_norms.py::test_neither_neighbours_nor_padding_change_a_document",
    ),
    Fault(
        "padding is read as text",
        "model/positions.py",
        "mask = attention_mask.bool()",
        "mask = torch.ones_like(attention_mask).bool()",
        "model/test_models.py::test_padding_does_not_matter",
    ),
    Fault(
        "attention's scores are not scaled where its matrix is shown",
        "model/mixers/attention/softmax_attention.py",
        'torch.einsum("bthd,bshd->bhts", q, k) * self.config.headdim**-0.5',
        'torch.einsum("bthd,bshd->bhts", q, k)',
        "model/mixers/test_mixers.py::test_forward_is_matrix_times_values",
    ),
    Fault(
        "an answer goes on behind its end token",
        "model/decoding.py",
        "enumerate(tokens) if token != end]",
        "enumerate(tokens)]",
        "model/test_decoding.py::test_a_prompt_leaves_the_batch_with_its_last_token",
    ),
    Fault(
        "elements of the MRU's state matrices are computed in fp8",
        "model/mixers/mru.py",
        'not_float8 = ("in_proj",)',
        "not_float8 = ()",
        "distributed/test_float8.py::test_which_products_are_in_fp8",
    ),
    Fault(
        "a document begins with the state of another one that ended in the row before",
        "model/carrying.py",
        "torch.where(continues, entering, fresh[self.first])",
        "torch.where(continues | True, entering, fresh[self.first])",
        "model/test_carrying.py::test_rows_that_go_on_are_one_long_row",
    ),
    Fault(
        "a document without tokens passes on another state of a convolution than it was given",
        "model/mixers/continued.py",
        "last = (bounds[1:].long() - width).unsqueeze(1) + steps",
        "last = (bounds[1:].long() - width).maximum(bounds[:-1].long() + 1).unsqueeze(1) + steps",
        "model/test_carrying.py::test_documents_go_on_from_states_of_their_own",
    ),
]

DATA = [
    Fault(
        "windows lie one token too far apart, and tokens are lost between them",
        "data/loading/packing.py",
        "first = self._window(epoch, slot, starts) * self.seqlen",
        "first = self._window(epoch, slot, starts) * (self.seqlen + 1)",
        "data/loading/test_loader.py::test_one_pass_counts_every_token_once",
    ),
    Fault(
        "the end token of a document is lost",
        "data/loading/packing.py",
        "out[length - 1] = self.suffix",
        "out[length - 1] = out[0]",
        "data/loading/test_order_and_packing.py::test_concat_windows_are_the_line_cut_up",
    ),
    Fault(
        "the border between two documents in a window is not marked",
        "data/loading/packing.py",
        "for _, _, end in self.documents[:-1]",
        "for _, _, end in self.documents[:-2]",
        "data/loading/test_order_and_packing.py::test_concat_windows_are_the_line_cut_up",
    ),
    Fault(
        "every epoch has the order of the first",
        "data/rng.py",
        "key = np.array([seed & _WORD, epoch & _WORD]",
        "key = np.array([seed & _WORD, 0]",
        "data/loading/test_loader.py::test_seed_and_epoch_change_the_order",
    ),
    Fault(
        "the order does not depend on the seed of the run",
        "data/rng.py",
        "key = np.array([seed & _WORD, epoch & _WORD]",
        "key = np.array([0, epoch & _WORD]",
        "data/loading/test_loader.py::test_seed_and_epoch_change_the_order",
    ),
    Fault(
        "every epoch has the masks of the first",
        "data/loading/masking.py",
        "generator(self.seed, epoch, MASKS, sample, ",
        "generator(self.seed, 0, MASKS, sample, ",
        "data/loading/test_masking.py::test_only_the_name_of_a_sample_matters",
    ),
    Fault(
        "a part of a row has the masks of its beginning",
        "data/loading/masking.py",
        "skip=3 * start",
        "skip=0 * start",
        "data/loading/test_shared_rows.py::test_parts_make_up_the_whole",
    ),
    Fault(
        "documents begin anew where ranks cut a row",
        "data/loading/batch.py",
        "boundaries = _boundaries(begins, counts) - first",
        "boundaries = (_boundaries(begins, counts) - first).clamp(0, len(inputs))",
        "data/loading/test_shared_rows.py::test_parts_make_up_the_whole",
    ),
    Fault(
        "special tokens are masked",
        "data/loading/masking.py",
        "self.choosable[[i for i in special_ids if 0 <= i < vocab_size]] = False",
        "pass",
        "data/loading/test_masking.py::test_shares",
    ),
    Fault(
        "a prediction of masked diffusion weighs the same at every rate",
        "data/loading/masking.py",
        "weights[place] = 1 / self.config.rate(self.seed, sample)",
        "weights[place] = 2.0",
        "data/loading/test_masking.py::test_samples_of_diffusion_have_rates_of_their_own",
    ),
    Fault(
        "all ranks read the share of the first",
        "data/loading/loader.py",
        "first = start + self.data_rank * self.rank_batch",
        "first = start",
        "data/loading/test_loader.py::test_global_batches_do_not_depend_on_ranks_or_workers",
    ),
    Fault(
        "a resumed loader begins one sequence later",
        "data/loading/loader.py",
        "self.samples = samples",
        "self.samples = samples + 1",
        "data/loading/test_loader.py::test_resume_in_the_middle_of_an_epoch",
    ),
    Fault(
        "the hash of a shard is not compared",
        "data/storage/storage.py",
        "if verify and sha256_of(path, offset, shard.bytes) != shard.sha256:",
        "if False:",
        "data/splits/test_damaged_shards.py::test_a_damaged_shard_is_named",
    ),
    Fault(
        "a document's text is cut by one token",
        "data/splits/writer.py",
        "self.pending.append(tokens)",
        "self.pending.append(tokens[:-1] if len(tokens) > 1 else tokens)",
        "data/loading/test_loader.py::test_prepared_text_comes_back",
    ),
    Fault(
        "unlike documents are taken for similar",
        "data/prepare/cleaning/duplicates.py",
        ".mean(axis=1) >= similarity",
        ".mean(axis=1) <= similarity",
        "data/prepare/test_cleaning.py::test_what_is_left_is_what_the_plain_definition_says",
    ),
    Fault(
        "documents are compared with those of their own part only",
        "data/prepare/cleaning/duplicates.py",
        "apart = _tops(root, ones) != _tops(root, others)",
        "apart = signatures.owners(ones) == signatures.owners(others)",
        "data/prepare/test_cleaning.py::test_what_is_left_is_what_the_plain_definition_says",
    ),
    Fault(
        "rows of a batch follow each other instead of going on from batch to batch",
        "data/loading/packing.py",
        "return lane * self._lane + batch",
        "return batch * self.lanes + lane",
        "data/loading/test_lanes.py::test_each_lane_reads_on",
    ),
]

TRAINING = [
    Fault(
        "positions without a target count in the loss",
        "train/tasks/cross_entropy.py",
        "loss = (partition - logits.gather(1, index)[:, 0]) * kept",
        "loss = partition - logits.gather(1, index)[:, 0]",
        "train/tasks/test_cross_entropy.py::test_equals_pytorch_in_value_and_gradient",
    ),
    Fault(
        "the gradient of the z-loss is half as large",
        "train/tasks/cross_entropy.py",
        "grad *= (1 + 2 * z_loss * chunk.partition)[:, None]",
        "grad *= (1 + z_loss * chunk.partition)[:, None]",
        "train/tasks/test_cross_entropy.py::test_equals_pytorch_in_value_and_gradient",
    ),
    Fault(
        "the losses of micro-batches are averaged, however many targets they have",
        "train/step.py",
        "engine.backward(loss.total / divisor",
        "engine.backward(loss.total / (self.task.count_targets(batch) * len(batches))",
        "train/test_loop.py::test_micro_batches_do_not_change_the_numbers",
    ),
    Fault(
        "a run that has gone back to a checkpoint replays a graph that works on the moments from before",
        "train/loop.py",
        "self.step.forget()",
        "self.step",
        "train/test_step.py::test_replays_are_the_same_steps_bit_for_bit",
    ),
    Fault(
        "a graph takes a step whose gradients are NaN",
        "train/engine/fsdp.py",
        "(~is_finite).float()",
        "torch.zeros_like(norm)",
        "train/test_step.py::test_replays_are_the_same_steps_bit_for_bit",
    ),
    Fault(
        "a rule's factor on the learning rate is ignored",
        "train/loop.py",
        'group["lr"] = lr * group["lr_factor"]',
        'group["lr"] = lr',
        "train/guards/test_best.py::test_lower_layers_learn_slower_and_frozen_parameters_stay",
    ),
    Fault(
        "vectors are decayed",
        "train/optim/groups.py",
        "_Treatment(None if len(shape) >= 2 else 0.0)",
        "_Treatment(None)",
        "train/optim/test_optimizer.py::test_decay_of_every_mixer",
    ),
    Fault(
        "fully decoupled decay is applied with the learning rate once more",
        "train/optim/groups.py",
        "group.weight_decay / config.lr if config.fully_decoupled else group.weight_decay",
        "group.weight_decay",
        "train/optim/test_optimizer.py::test_fully_decoupled_decay_does_not_depend_on_the_peak_rate",
    ),
    Fault(
        "StableAdamW takes the root mean square of a shard",
        "train/optim/stable_adamw.py",
        "sum_over_parts(grad.square().div_(exp_avg_sq.clip(min=eps)).sum(), whole)",
        "grad.square().div_(exp_avg_sq.clip(min=eps)).sum()",
        "distributed/test_engines.py::test_every_optimizer_on_shards",
    ),
    Fault(
        "Adafactor takes the means of a shard's columns",
        "train/optim/adafactor.py",
        "sum_over_parts(torch.cat([one.flatten() for one in sums]), parameter).split",
        "torch.cat([one.flatten() for one in sums]).split",
        "distributed/test_engines.py::test_every_optimizer_on_shards",
    ),
    Fault(
        "SOAP's first bases follow rounding where a gradient has no rank",
        "train/optim/soap.py",
        "rest.copy_(torch.linalg.qr(rest @ rest[:count].T)[0])",
        "rest.copy_(rest)",
        "distributed/test_engines.py::test_every_optimizer_on_shards",
    ),
    Fault(
        "moments of 8 bits are rounded down",
        "train/optim/adamw_8bit.py",
        "(code + (flat >= self.above.index_select(0, code))).view_as(numbers)",
        "code.view_as(numbers)",
        "train/optim/test_optimizer.py::test_eight_bits_are_torchao_s",
    ),
    Fault(
        "Muon makes the parts of a projection orthogonal as one matrix",
        "train/optim/muon.py",
        "blocks.append(rows or (len(parameter),))",
        "blocks.append((len(parameter),))",
        "train/optim/test_muon.py::test_blocks_are_orthogonal_each_by_itself",
    ),
    Fault(
        "muP leaves out the factor that the MRU puts on what it reads",
        "model/mixers/mru.py",
        '"state_down": (order, self.output_scale)}',
        '"state_down": (order, 1.0)}',
        "train/optim/test_width.py::test_the_mru_has_the_factors_of_its_matrices_and_of_the_factors_within_it",
    ),
    Fault(
        "one rank makes all matrices orthogonal",
        "train/optim/owners.py",
        "heapq.heapreplace(busy, (cost + one.cost, rank))",
        "heapq.heapreplace(busy, (cost, rank))",
        "train/optim/test_muon.py::test_owners_have_as_much_to_do",
    ),
    Fault(
        "the warm-up is one step late",
        "train/optim/config.py",
        "(1 - config.start) * (step / warmup)",
        "(1 - config.start) * ((step - 1) / warmup)",
        "train/optim/test_schedule.py::test_warmup_rises_linearly_and_the_peak_is_reached",
    ),
    Fault(
        "averages follow the weights as fast as they should keep the past",
        "train/optim/averaging.py",
        "pulls.setdefault(1 - decay_at(step, config)",
        "pulls.setdefault(decay_at(step, config)",
        "train/optim/test_averaging.py::test_it_is_its_definition",
    ),
    Fault(
        "small gradients are scaled up to the clipping norm",
        "train/engine/clipping.py",
        "torch.clamp(limits[name] / (norm + 1e-6), max=1.0)",
        "limits[name] / (norm + 1e-6)",
        "train/engine/test_clipping.py::test_gradients_are_clipped_to_the_limit_of_their_group",
    ),
    Fault(
        "a step whose gradient is NaN is taken",
        "train/engine/clipping.py",
        "is_finite = math.isfinite(whole.item()) if waits",
        "is_finite = True if waits",
        "train/test_loop.py::test_a_nan_step_is_skipped_and_counted",
    ),
    Fault(
        "what a block keeps stays on the device though it was copied to the host",
        "train/activation.py",
        "return tensor.device, copy.copy_(tensor, non_blocking=True)",
        "copy.copy_(tensor, non_blocking=True)\n            return tensor.device, tensor",
        "distributed/test_activation.py::test_what_blocks_keep_lies_elsewhere_and_weights_do_not_move",
    ),
    Fault(
        "gradients that DeepSpeed has offloaded are not clipped by groups",
        "train/engine/zero.py",
        "gradients[name].append(self.flat[index].grad)",
        "gradients[name].append(self.flat[index].grad.clone())",
        "distributed/test_engines.py::test_every_engine_on_two_ranks",
    ),
    Fault(
        "the all-reduce of gradients is left out",
        "train/engine/fsdp.py",
        "self.module.set_requires_gradient_sync(last)",
        "self.module.set_requires_gradient_sync(False)",
        "distributed/test_engines.py::test_every_engine_on_two_ranks",
    ),
    Fault(
        "the norm of the gradients is that of one rank's part",
        "train/engine/fsdp.py",
        "whole = squares.sqrt()",
        "whole = norms",
        "distributed/test_engines.py::test_every_engine_on_two_ranks",
    ),
    Fault(
        "dropout begins again with the same numbers after a resume",
        "train/checkpoint/save.py",
        'torch.set_rng_state(_decode(state["torch"]))',
        "pass",
        "distributed/test_environment.py::test_generators_are_seeded_by_rank_and_restored",
    ),
    Fault(
        "a decay falls linearly, whatever its shape is",
        "train/optim/config.py",
        "_SHAPES[config.decay_shape if config.is_stable else config.name]",
        "_SHAPES[config.name if config.name in _SHAPES else 'linear']",
        "train/optim/test_schedule.py::test_wsd_falls_by_the_shape_of_its_decay",
    ),
    Fault(
        "a decay may begin inside of another one",
        "train/init/start.py",
        "if config.init.decay and step > stable:",
        "if config.init.decay and step > there.steps:",
        "train/init/test_branches.py::test_what_cannot_go_on_is_refused_in_a_line",
    ),
    Fault(
        "longer sequences go on at the number of a shorter one",
        "data/loading/loader.py",
        "samples, saved = -(-samples * was // now), {**saved",
        "samples, saved = samples, {**saved",
        "data/loading/test_loader.py::test_shorter_sequences_of_a_window_are_read_in_its_order",
    ),
    Fault(
        "a mean of checkpoints is summed in float32",
        "use/averaging.py",
        "state.read(key, start, stop).double()",
        "state.read(key, start, stop)",
        "use/test_averaging.py::test_the_mean_of_the_last_checkpoints_is_exact_and_a_run",
    ),
    Fault(
        "the hash of a checkpoint's file is not compared",
        "train/checkpoint/manifest.py",
        "path.stat().st_size == size and sha256(path) == value",
        "path.stat().st_size == size",
        "distributed/checkpoints/test_checkpoint.py::test_damage_is_found_before_anything_is_read",
    ),
    Fault(
        "one checkpoint less than asked for is kept",
        "train/checkpoint/manager.py",
        "*valid[-self.keep_last :]",
        "*valid[1 - self.keep_last :]",
        "distributed/checkpoints/test_checkpoint.py::test_what_is_kept",
    ),
    Fault(
        "a checkpoint holds no steps of the optimizer",
        "train/engine/fsdp.py",
        'state[f"{OPTIMIZER}{name}.{entry}"] = value',
        'state[f"{OPTIMIZER}{name}.{entry}"] = torch.zeros_like(value) if entry == "step" else value',
        "train/test_loop.py::test_resuming_in_the_middle_is_bit_identical",
    ),
    Fault(
        "after a resume each rank carries the states of the first one",
        "train/checkpoint/lanes.py",
        "divmod(self.loader.data_rank * self.size + lane, share)",
        "divmod(0 * self.size + lane, share)",
        "distributed/runs/test_carried_runs.py::test_any_number_of_ranks",
    ),
    Fault(
        "a state that is not finite is carried on after the step that was skipped",
        "train/loop.py",
        "self.lanes.forget()  # what made",
        "self.lanes.rows  # what made",
        "train/test_carry.py::test_a_state_that_is_not_finite_costs_one_step",
    ),
]

AROUND = [
    Fault(
        "a run gets one restart less than allowed",
        "launch/jobs/attempts.py",
        "if failures > max_requeues:",
        "if failures >= max_requeues:",
        "launch/jobs/test_attempts.py::test_decisions",
    ),
    Fault(
        "a run that stopped and saved is not started again",
        "launch/jobs/attempts.py",
        "return self.code == EXIT_STOPPED or",
        "return",
        "launch/jobs/test_attempts.py::test_decisions",
    ),
    Fault(
        "a launch of several phases is taken as finished when one is",
        "launch/jobs/attempts.py",
        "if not (phase and outcomes[rank].code == EXIT_OK != code):",
        "if True:",
        "launch/jobs/test_attempts.py::test_an_attempt_of_several_phases_is_where_its_last_one_is",
    ),
    Fault(
        "an exported tokenizer leaves out the end token",
        "model/interop/export/tokenizer.py",
        'after = f" {tokens[suffix]}" if suffix is not None else ""',
        'after = ""',
        "export/test_runs.py::test_exports_put_the_special_tokens_of_the_training_around_text",
    ),
    Fault(
        "an export takes weights of another shape",
        "model/interop/export/weights.py",
        "if tensor.shape != expected[name]:",
        "if False:",
        "export/test_weights.py::test_weights_of_another_model_are_refused",
    ),
    Fault(
        "top-p leaves out the likeliest token",
        "model/interop/export/unmasking.py",
        "probabilities.where(before < top_p, 0.0)",
        "probabilities.where(before > top_p, 0.0)",
        "use/test_generation.py::test_frequencies",
    ),
]

FAULTS = [*KERNELS, *MODELS, *DATA, *TRAINING, *AROUND]


def copy_of_the_tree(folder: Path) -> Path:
    """Copies the package and its tests to `folder`/matmix."""
    written = ("build", "runs", "exports", "datasets", "trackers")

    def left_out(of: str, names: list[str]) -> list[str]:
        here = written if Path(of) == ROOT else ()
        return [name for name in names if name.startswith(".") or name == "__pycache__" or name in here]

    return shutil.copytree(ROOT, folder / "matmix", ignore=left_out)


def run_tests(copy: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs tests of a copy, up to the first that fails."""
    paths = [str(copy / "tests" / test) for test in tests]
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *paths]
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def found_by(fault: Fault, copy: Path, number: int) -> str:
    """Puts a fault into a copy, runs its test, and takes the fault out again. Returns the test that failed, or ""."""
    file = copy / fault.file
    text = file.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, fault.file
    try:
        write(file, text.replace(fault.old, fault.new), 2 * number)
        said = run_tests(copy, [fault.test]).stdout
    finally:
        write(file, text, 2 * number + 1)
    return next((line.split()[1] for line in said.splitlines() if line.startswith("FAILED ")), "")


def write(file: Path, text: str, number: int) -> None:
    """Writes a file with a time of its own, by which Python sees that what it has compiled is of another text."""
    file.write_text(text, encoding="utf-8")
    os.utime(file, (time.time() + 10 * number,) * 2)


def main(words: list[str]) -> int:
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_the_tree(Path(folder))
        whole = run_tests(copy, sorted({fault.test for fault in chosen}))
        if whole.returncode:
            print(f"the tests fail without any fault:\n{whole.stdout}{whole.stderr}")
            return 1
        missed = 0
        for number, fault in enumerate(chosen, start=1):
            test = found_by(fault, copy, number)
            missed += not test
            print(f"found   {fault.name}: {test}" if test else f"MISSED  {fault.name}: {fault.test}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults are found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
