"""A fixed list of faults in the package, and for each the tests that must fail: `python -m tests.planted_faults`.

Each fault replaces a text that occurs once in a file of src. It is planted in a copy of the package, which the tests
then import. Arguments are parts of the names of faults to run instead of all. Without any argument this takes about a
quarter of an hour. The exit status is 1 if a fault is not found.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["FAULTS", "SAMPLE", "Fault", "is_found", "main"]

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PATIENCE = 600
"""Seconds for the tests of one fault; tests that hang have found it."""


class Fault(NamedTuple):
    """A text of a file that is replaced."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: public tests that must fail, and `-k` with what selects a few of them."""
    backend: str = "torch"


MATRIX = "tests/test_gradients.py"
STATS, LOG_PROBS, ROWS = "tests/test_stats.py", "tests/test_log_probs.py", "tests/test_sampled_rows.py"
SHARDS, PROMISES = "tests/distributed/test_shards.py", "tests/distributed/test_promises.py"
HEADS, SCALE, TARGET = "tests/test_heads.py", "tests/torch/test_scale.py", "tests/torch/test_target_gradient.py"
EAGER, AUTOGRAD = "tests/torch/test_eager.py", "tests/torch/test_autograd.py"
SKIPPED, TOP_K = "tests/torch/test_skipped_rows.py", "tests/test_top_k.py"
DIVERGENCE, TRANSFORMS = "tests/divergence/test_matrix.py", "tests/torch/test_transforms.py"
PORTABLE = "backends/torch/portable/"
KERNELS = "backends/triton/kernels/"

FAULTS = [
    # The finish of PyTorch: losses, statistics, coefficients.
    Fault(
        "smoothing without the target's own share", PORTABLE + "steps.py",
        "(1 - smoothing + spread)", "(1 - smoothing)", (MATRIX, "-k", "smoothing"),
    ),
    Fault(
        "z-loss not weighted by rows", PORTABLE + "steps.py",
        "z_term = facts.weight * times(z_loss", "z_term = times(z_loss", (MATRIX, "-k", "z_loss"),
    ),
    Fault(
        "gradient of the z-loss halved", PORTABLE + "steps.py",
        "terms.append(2 * z_loss * r * lse)", "terms.append(z_loss * r * lse)",
        (MATRIX, "-k", "z_loss"),
    ),
    Fault(
        "gradient of the entropy without the entropy", PORTABLE + "steps.py",
        "terms.append(-of_entropy * entropy)", "terms.append(-of_entropy)", (MATRIX, "-k", "entropy"),
    ),
    Fault(
        "gradient of the entropy, sign of log p", PORTABLE + "steps.py",
        "alpha = alpha - beta * log_sum", "alpha = alpha + beta * log_sum", (MATRIX, "-k", "entropy"),
    ),
    Fault(
        "nll of class probabilities without gradient", PORTABLE + "steps.py",
        'terms.append(of_nll * sums["given"])', "pass",
        (MATRIX, "-k", "probabilities and stats"),
    ),
    Fault(
        "gradient of smoothing over one class too many", PORTABLE + "steps.py",
        "smoothing / facts.setting.vocabulary", "smoothing / (facts.setting.vocabulary + 1)",
        (MATRIX, "-k", "smoothing"),
    ),
    Fault(
        "smoothing of the target not weighted", PORTABLE + "steps.py",
        'w_y = sums.get("row_weight", 1) * (', "w_y = (",
        (MATRIX, "-k", "weight and smoothing"),
    ),
    Fault(
        "softcap not differentiated at the target", PORTABLE + "rows.py",
        "        if self._slope is not None:\n",
        "        if self._slope is not None:\n            self._put(self._slope, 1.0)\n", (MATRIX, "-k", "softcap"),
    ),
    Fault(
        "scale and temperature not differentiated", PORTABLE + "steps.py",
        "r, of_lse, of_nll, of_entropy = [None if factor is None else times(linear, factor) for factor in factors]",
        "pass",
        (MATRIX, "-k", "scale or temperature"),
    ),
    Fault(
        "entropy without the target", PORTABLE + "steps.py",
        "entropy + times(own, nll) if is_class else entropy", "entropy", (STATS, MATRIX, "-k", "entropy"),
    ),
    Fault(
        "log sum of squares, one log too few", PORTABLE + "steps.py",
        "own**2).log() - 2 * log_sum", "own**2).log() - log_sum", (STATS,),
    ),
    Fault(
        "mean logit over one class too many", PORTABLE + "steps.py",
        'sums["deficit"] / sums["counted"].clamp(min=1)', 'sums["deficit"] / (sums["counted"] + 1)', (STATS,),
    ),
    Fault(
        "lse relative to the peak", PORTABLE + "steps.py",
        'results["lse"] = peak + log_sum', 'results["lse"] = log_sum', (STATS, MATRIX, "-k", "lse"),
    ),
    # The facts of rows.
    Fault(
        "ignored rows weigh", PORTABLE + "facts.py",
        "weight = weight.masked_fill(self.ignored, 0)", "pass", (MATRIX, "-k", "ignore_index"),
    ),
    Fault(
        "ignore_index is always -100", PORTABLE + "facts.py",
        "nonempty(ids == ignore_index)", "nonempty(ids == -100)",
        (MATRIX, "-k", "ignore_index"),
    ),
    Fault(
        "divisor without row weights", PORTABLE + "facts.py",
        "alike, whole = False, weight * weights_of(", "alike, whole = False, weights_of(",
        (MATRIX, "-k", "sample_weight and weight"),
    ),
    Fault(
        "upstream gradient of the loss lost", PORTABLE + "facts.py",
        "self.scale * upstream.loss.to(dtype)", "self.scale * torch.ones_like(upstream.loss)",
        (MATRIX, "-k", "none"),
    ),
    Fault(
        "float16 gradients without the size of weights", PORTABLE + "facts.py",
        "self.weight / size, size / self.divisor",
        "self.weight / size, 1 / self.divisor",
        (MATRIX, "-k", "float16 and sample_weight"),
    ),
    Fault(
        "float16 gradients without the size of a z-loss", PORTABLE + "facts.py",
        "others = 4 * options.z_loss", "others = 0.0",
        ("tests/test_numbers.py", "-k", "before_the_division"),
    ),
    # Results.
    Fault(
        "accuracy over all rows", PORTABLE + "steps.py",
        'correct.sum().to(facts.dtype) / self._result("count").clamp(min=1)', "correct.to(facts.dtype).mean()",
        (STATS, "-k", "accuracy or stat"),
    ),
    Fault(
        "predictions of ignored rows", PORTABLE + "steps.py",
        '-1 if name == "predictions" else 0', "0",
        (STATS, LOG_PROBS),
    ),
    Fault(
        "NaN in rows of weight 0", PORTABLE + "steps.py",
        "absent = facts.excluded if summed", "absent = None if summed",
        ("tests/test_promises.py",),
    ),
    # The rows of PyTorch.
    Fault(
        "target logits of 16 bits without bias", PORTABLE + "steps.py",
        "target_logits if source.bias is None else target_logits + source.bias[place]", "target_logits",
        (MATRIX, "-k", "bias and (float16 or bfloat16)"),
    ),
    Fault(
        "rows in the wrong order", "backends/torch/contract.py",
        "return skippable.argsort(stable=True), (~skippable).sum()",
        "return skippable.logical_not().argsort(stable=True), (~skippable).sum()",
        (SKIPPED, MATRIX, "-k", "ignore_index or ignored"),
    ),
    Fault(
        "slope of the softcap forgotten", PORTABLE + "rows.py",
        "            g.mul_(self._slope)", "            pass", (MATRIX, "-k", "softcap"),
    ),
    Fault(
        "class weights not in the gradient of smoothing", PORTABLE + "rows.py",
        "g.sub_(share[:, None] * shares)", "g.sub_(share[:, None])", (MATRIX, "-k", "weight and smoothing"),
    ),
    Fault(
        "reference of a row with a negative scale", KERNELS + "fold.py",
        "    seen = activate(z, activation, way)\n", "    seen = z\n",
        ("tests/triton/test_rows.py", "-k", "negative_scale"), "triton",
    ),
    Fault(
        "reference of long rows without its factor", PORTABLE + "rows.py",
        '{"rest", "mixed", "squares"}', '{"mixed", "squares"}', ("tests/torch/test_many_classes.py", "-k", "kinds"),
    ),
    Fault(
        "support: the wrong classes", PORTABLE + "facts.py",
        "return mask.scatter_(1, local, False)[:, :width]",
        "return mask.scatter_(1, local, False)[:, :width].flip(1)",
        (ROWS, LOG_PROBS, MATRIX, "-k", "support"),
    ),
    Fault(
        "activation without temperature", PORTABLE + "rows.py",
        "x.div_(temperature if x.dim() == 1 else temperature[:, None])", "pass",
        (LOG_PROBS, MATRIX, "-k", "temperature"),
    ),
    # Divergences.
    Fault(
        "mixture of p and q exchanged", "backends/divergence_terms.py",
        "m = (1 - beta) * p + beta * q", "m = beta * p + (1 - beta) * q", (DIVERGENCE,),
    ),
    Fault(
        "reverse divergence without its mean", PORTABLE + "divergence.py",
        'times(p, coefficients["pull"][:, None] - v)', "times(p, -v)", (DIVERGENCE,),
    ),
    Fault(
        "bucket without the other classes", PORTABLE + "divergence.py",
        "(pulled[:, -1:] / rest)", "(p[:, -1:] / rest)", (DIVERGENCE,),
    ),
    Fault(
        "total variation with its gradient turned", "backends/divergence_terms.py",
        "ops.sign(apart) / -2", "ops.sign(apart) / 2", (DIVERGENCE, "-k", "tv"),
    ),
    Fault(
        "total variation of cells with another factor", PORTABLE + "divergence.py",
        "times(p, times(p, v).sum(-1, keepdim=True) - v) * factor",
        "times(p, times(p, v).sum(-1, keepdim=True) - v) * 2", (DIVERGENCE, "-k", "tv"),
    ),
    Fault(
        "classes of a subset in another order", "backends/torch/prepare.py",
        "return Dense(gathered(source, ids), activation)",
        "return Dense(gathered(source, ids.sort().values), activation)",
        ("tests/divergence/test_subset.py",),
    ),
    Fault(
        "rows without a later token with weight 1", "backends/torch/prepare.py",
        "weight = each(torch.ones(rows, dtype=sum_dtype, device=device), 0)",
        "weight = torch.ones(math.prod(rows), dtype=sum_dtype, device=device)", ("tests/divergence/test_shift.py",),
    ),
    Fault(
        "divergence of the first rank only", PORTABLE + "steps.py",
        "                total = total + other", "                pass",
        ("tests/distributed/test_divergences.py",),
    ),
    Fault(
        "top-k classes of the first rank only", PORTABLE + "steps.py",
        "merged = {name: sums.amax(0) for", "merged = {name: sums[0] for", ("tests/distributed/test_divergences.py",),
    ),
    # Loop, sources, products.
    Fault(
        "saved sums of the first rows for every part", "backends/torch/loop.py",
        "saved[:, part.indices].unsqueeze(0).contiguous()",
        "saved[:, : part.stop - part.start].unsqueeze(0).contiguous()", (MATRIX, SKIPPED, "-k", "none"),
    ),
    Fault(
        "last part never lands", "backends/torch/loop.py",
        "    if waiting is not None:\n        _finish(", "    if waiting is not None and False:\n        _finish(",
        (SHARDS, "-k", "workspace"),
    ),
    Fault(
        "gradient of padding classes", "backends/torch/sources.py",
        "                self._gradients[..., width:] = 0", "                self._gradients[..., width:] = 1",
        (SHARDS, "tests/distributed/test_dtensors.py", "-k", "padded"),
    ),
    Fault(
        "two parts in one memory", "backends/torch/sources.py",
        "self._turn = 1 - self._turn if self.overlaps else 0", "self._turn = 0", (SHARDS, "-k", "workspace"),
    ),
    Fault(
        "classifier's gradient of the last part only", "backends/torch/sources.py",
        "        if of_weight is not None:\n", "        if of_weight is not None and part.last:\n",
        (MATRIX, "-k", "workspace"),
    ),
    Fault(
        "input's gradient not summed over ranks", "backends/torch/sources.py",
        "of_input if self._tokens is None else self._tokens.own(of_input.wait())", "self._gradients[0]", (SHARDS,),
    ),
    Fault(
        "gradient of skipped rows not zeroed", "backends/torch/sources.py",
        "                of_input.index_fill_(0, left_out, 0)", "                pass", (SKIPPED,),
    ),
    Fault(
        "padding of logits not zeroed if only hidden states are trained", "backends/torch/sources.py",
        "if missing and not (needs[1] and loaded.hidden is loaded.trained):",
        "if missing and loaded.hidden is not loaded.trained:", (SKIPPED, "-k", "padding"), "triton",
    ),
    Fault(
        "plan of another number of classes", "backends/torch/operations.py",
        "[facts_of(tensor, name, -1) for", "[facts_of(tensor, '', -1) for", (EAGER, "-k", "any_number_of_classes"),
        "triton",
    ),
    Fault(
        "plan of class weights of another layout", "backends/torch/signature.py",
        "tensor.requires_grad, tensor.is_contiguous(), aligned\n", "tensor.requires_grad, aligned\n",
        ("tests/triton/test_launches.py",), "triton",
    ),
    Fault(
        "bias of another dtype added to the product", "backends/torch/sources.py",
        "for factor in (source.input, source.weight, source.bias)", "for factor in (source.input, source.weight)",
        (EAGER, "-k", "each_factor"), "triton",
    ),
    Fault(
        "float16 gradients of MLX stored too small", "backends/mlx/facts.py",
        "size / _headroom(call, slope), size)", "size, size)", ("tests/test_numbers.py", "-k", "heavier"), "mlx",
    ),
    Fault(
        "float16 gradients of MLX stored too large", "backends/mlx/facts.py",
        "    if isinstance(target, Probabilities):\n        mass", "    if False:\n        mass",
        ("tests/test_numbers.py", "-k", "large_sum"), "mlx",
    ),
    Fault(
        "a support without rows has fewer tensors", "backends/torch/prepare.py",
        "    if not looks:\n        offsets =", "    if not looks and len(begin):\n        offsets =",
        ("tests/torch/test_plans.py", "-k", "without_rows"),
    ),
    Fault(
        "gradient of the bias of one part", "backends/torch/sources.py",
        "of_bias += grad.sum(0, dtype=of_bias.dtype)", "of_bias.copy_(grad.sum(0, dtype=of_bias.dtype))",
        (SKIPPED,),
    ),
    # Preparation and packing.
    Fault(
        "shifted targets end with class 0", "backends/torch/prepare.py",
        "target = Classes(each(target.ids, options.ignore_index,", "target = Classes(each(target.ids, 0,",
        (MATRIX, "-k", "shift"),
    ),
    Fault(
        "last rows of a shifted divergence weigh 1", "backends/torch/prepare.py",
        "        weight = each(weight, 0, sum_dtype)", "        weight = each(weight, 1, sum_dtype)",
        ("tests/divergence",),
    ),
    Fault(
        "heads without their divisors", "backends/torch/prepare.py",
        "        weight = torch.where(divisor == 0, 0, weight / divisor)", "        pass",
        (HEADS,),
    ),
    Fault(
        "heads without their weights", "backends/torch/prepare.py",
        "torch.stack([row * factor for row", "torch.stack([row * 1.0 for row", (HEADS,),
    ),
    Fault(
        "packed numbers rounded", "backends/torch/codec.py",
        "return '{\"hex\":\"' + value.hex() + '\"}'",
        "return '{\"hex\":\"' + round(value, 1).hex() + '\"}'",
        ("tests/torch/test_compile.py", "-k", "compiles_whole"),
    ),
    Fault(
        "packed fields with the defaults", "backends/torch/codec.py",
        "for name, field in fields.items()})", 'for name, field in fields.items() if name != "label_smoothing"})',
        ("tests/torch/test_compile.py", "-k", "compiles_whole"),
    ),
    # Autograd.
    Fault(
        "upstream gradient ignored in place", "backends/torch/function.py",
        "if factor.is_cpu and inplace and float(factor) == 1:", "if factor.is_cpu and inplace:",
        (EAGER, AUTOGRAD, MATRIX, "-k", "upstream or sum"),
    ),
    Fault(
        "retained graph overwritten", "backends/torch/function.py",
        "may_overwrite = plain and not (torch.is_grad_enabled() or private.keeps_graph())", "may_overwrite = plain",
        (EAGER, AUTOGRAD),
    ),
    Fault(
        "version of overwritten logits", "backends/torch/function.py",
        "            torch.autograd.graph.increment_version(leaves[0])", "            pass",
        ("tests/torch/test_inplace.py", "tests/torch/test_autograd.py"), "triton",
    ),
    Fault(
        "second derivatives are zero", "backends/torch/function.py",
        "        if is_plain([first]):\n            raise RuntimeError(refusals.NO_SECOND)",
        "        if is_plain([first]):\n            return (None,) * len(ctx.needs_input_grad)",
        (AUTOGRAD, TRANSFORMS, "-k", "second"),
    ),
    Fault(
        "gradient of the scale not divided", "backends/torch/loop.py",
        "of_scale: Tensor = total / setting.call.activation.logit_scale", "of_scale: Tensor = total * 1", (SCALE,),
    ),
    Fault(
        "gradient of probabilities without smoothing", "backends/torch/loop.py",
        "scales = factor[:, None] * (1 - options.label_smoothing) * class_weight",
        "scales = factor[:, None] * class_weight",
        (MATRIX, TARGET),
    ),
    Fault(
        "gradient of shared probabilities of one head", "backends/torch/loop.py",
        "flat.index_add_(0, row_facts.order.clamp(min=0), of_block)", "flat[row_facts.order.clamp(min=0)] = of_block",
        (TARGET, "-k", "heads"),
    ),
    Fault(
        "one upstream gradient for a whole batch", "backends/torch/function.py",
        "tensor if dim is None else tensor.select(dim, entry)", "tensor if dim is None else tensor.select(dim, 0)",
        (TRANSFORMS, "-k", "batched or jacrev"),
    ),
    Fault(
        "autocast forgotten", "backends/torch/prepare.py",
        'autocast = device != "meta" and torch.is_autocast_enabled(device)', "autocast = False",
        (TRANSFORMS, "-k", "autocast"),
    ),
    # Shards.
    Fault(
        "sums of ranks not rebased", PORTABLE + "steps.py",
        "factors, rest = (-growth).exp(), by_rank", "factors, rest = torch.ones_like(growth), by_rank", (SHARDS,),
    ),
    Fault(
        "entropy of ranks not rebased", PORTABLE + "steps.py",
        'factors * (by_rank["mixed"] - growth * rest)', 'factors * by_rank["mixed"]',
        (SHARDS, "-k", "stats or entropy"),
    ),
    Fault(
        "smoothing of ranks not rebased", PORTABLE + "steps.py",
        "by_rank[name] + (by_rank[count] * growth).masked_fill(by_rank[count] == 0, 0)", "by_rank[name]",
        (SHARDS, "-k", "smoothing or probabilities"),
    ),
    Fault(
        "prediction of the first rank", PORTABLE + "steps.py",
        "torch.where(wins, by_rank[place], torch.iinfo(torch.int64).max).amin(0)", "by_rank[place].amin(0)", (SHARDS,),
    ),
    Fault(
        "shards of one size", "backends/torch/shards/ranges.py",
        "firsts = [sum(stated.rows for stated in table[:place]) for place in range(ranks)]",
        "firsts = [place * rank_0.rows for place in range(ranks)]", (SHARDS,),
    ),
    Fault(
        "padding is a class", "backends/torch/plan.py",
        "width = classes if shards is None else max(min(first + classes, size) - min(first, size), 0)",
        "width = classes", (SHARDS,),
    ),
    Fault(
        "tokens in the order of the wrong axis", "backends/torch/shards/collectives.py",
        "return summed[: self.shape[self.axis]].movedim(0, self.axis)",
        "return summed[: self.shape[self.axis]].flip(0).movedim(0, self.axis)", (SHARDS, PROMISES),
    ),
    Fault(
        "tokens of ranks gathered in another order", "backends/torch/shards/collectives.py",
        "return pieces.flatten(0, 1)[: self.length]", "return pieces.flip(0).flatten(0, 1)[: self.length]", (SHARDS,),
    ),
    Fault(
        "gradient of tokens not summed over ranks", "backends/torch/shards/collectives.py",
        "_scatter(out, pieces, group=self.group, async_op=True) if out.numel() else None",
        "[out.copy_(pieces[: len(out)]), None][1]", (SHARDS,),
    ),
    Fault(
        "class weights of another rank's targets", PORTABLE + "facts.py",
        "        gathered = add_up(gathered, shards.group).wait()", "        pass", (SHARDS,),
    ),
    Fault(
        "a kernel's pull of a divergence in shards", KERNELS + "divergence_kernel.py",
        "pulls += times(p, v) if REVERSE else p * v", "pulls += p * v * 0.5",
        ("tests/triton/test_ranks.py", "-k", "divergences"), "triton",
    ),
    Fault(
        "sums over ranks not waited for", "backends/torch/shards/collectives.py",
        "return Pending(array, _reduce(array, group=group, async_op=True), array)", "return Pending(array)",
        (SHARDS,),
    ),
    # Triton kernels, in the interpreter.
    Fault(
        "kernel: gradient of the z-loss halved", KERNELS + "algebra.py",
        "excess += times(2 * r * z_loss, lse)", "excess += times(r * z_loss, lse)", (MATRIX, "-k", "z_loss"), "triton",
    ),
    Fault(
        "kernel: gradient of the entropy without the entropy", KERNELS + "algebra.py",
        "excess -= times(v, entropy)", "excess -= v", (MATRIX, "-k", "entropy"), "triton",
    ),
    Fault(
        "kernel: entropy of a sure row", KERNELS + "algebra.py",
        "near = nll + LN2 * (", "near = LN2 * (", ("tests/triton/test_rows.py", "-k", "sure_row"), "triton",
    ),
    Fault(
        "kernel: sum of squares of a sure row", KERNELS + "algebra.py",
        "near = log1p(squares / safe_square) - 2 * nll", "near = log1p(squares / safe_square) - nll",
        ("tests/triton/test_rows.py", "-k", "hard_rows and statistics"), "triton",
    ),
    Fault(
        "kernel: strides of row weights", "backends/torch/prepare.py",
        "return array.reshape(-1).contiguous()", "return array.reshape(-1)",
        ("tests/test_promises.py", "-k", "strides"), "triton",
    ),
    Fault(
        "kernel: gradient not divided", KERNELS + "algebra.py",
        "r = tl.div_rn(a, tl.where(divisor == 0, 1.0, divisor) + tl.zeros_like(a))", "r = a",
        (MATRIX, "-k", "mean"), "triton",
    ),
    Fault(
        "kernel: ignore_index is always -100", KERNELS + "algebra.py",
        "ignored = ignored | (y == ignore_index)", "ignored = ignored | (y == -100)",
        (MATRIX, "-k", "ignore_index"), "triton",
    ),
    Fault(
        "kernel: NaN in rows of weight 0", KERNELS + "algebra.py",
        "skipped = excluded if index == 0 or index == 6 else ignored", "skipped = excluded if index == 6 else ignored",
        ("tests/test_promises.py", STATS), "triton",
    ),
    Fault(
        "kernel: ties go to a later block", KERNELS + "fold.py",
        "at = tl.where(largest > best, first, at)", "at = tl.where(largest >= best, first, at)",
        ("tests/triton/test_shared_rows.py", "-k", "statistics"), "triton",
    ),
    Fault(
        "kernel: smoothing at the target", KERNELS + "algebra.py",
        "times(excess, e_y / total) - gamma * (rest / total) - delta * w_y",
        "times(excess, e_y / total) - gamma * (rest / total)", (MATRIX, "-k", "smoothing"), "triton",
    ),
    Fault(
        "kernel: rows in the wrong order", KERNELS + "sums.py",
        "tl.where(skipped, count - 1 - (row - before), before), row, mask", "before, row, mask",
        (SKIPPED, "-k", "triton"), "triton",
    ),
    Fault(
        "kernel: ignored rows divide a mean", KERNELS + "rows_kernel.py",
        "divisor = tl.sum(tl.where(wrong, 0.0, weight), 0)", "divisor = count.to(tl.float32)",
        (MATRIX, "-k", "mean"), "triton",
    ),
    Fault(
        "kernel: softcap not differentiated", KERNELS + "rows_kernel.py",
        "g *= slope(z, activation, way)", "g *= 1.0", (MATRIX, "-k", "softcap"), "triton",
    ),
    Fault(
        "kernel: logit scale not differentiated", KERNELS + "rows_kernel.py",
        "scale = 1.0 if way.capped else activation[0]", "scale = 1.0", (MATRIX, "-k", "scale"), "triton",
    ),
    Fault(
        "kernel: later tiles overwrite the first", KERNELS + "fold.py",
        "there, least = adds != 0,", "there, least = adds > 1,", ("tests/triton/test_tiles.py",), "triton",
    ),
    Fault(
        "kernel: gradient of a loss without an upstream gradient", KERNELS + "algebra.py",
        "r = tl.where(has_statistics(upstreams) & (is_given(upstreams.loss) == 0), 0.0, r)", "r = r * 1.0",
        (MATRIX, "-k", "stats or entropy"), "triton",
    ),
    Fault(
        "kernel: no gradient at class 0", KERNELS + "rows_kernel.py",
        "g_y.to(grad.dtype.element_ty), mask=has_target)", "g_y.to(grad.dtype.element_ty), mask=has_target & (y > 0))",
        ("tests/triton/test_rows.py", "-k", "sizes"), "triton",
    ),
    Fault(
        "kernel: ranks overwrite each other", KERNELS + "sums.py",
        "merged = plus(merged, load_sums(place, count, inside, m, columns))",
        "merged = load_sums(place, count, inside, m, columns)",
        ("tests/triton/test_ranks.py", "-k", "saturated"), "triton",
    ),
    Fault(
        "kernel: entropy of tiles not rebased", KERNELS + "sums.py",
        "factor * (mixed - growth * rest),", "factor * mixed,", ("tests/triton/test_tiles.py",), "triton",
    ),
    Fault(
        "kernel: ties of tiles", KERNELS + "sums.py",
        "lower = tl.minimum(place, other_place)", "lower = tl.maximum(place, other_place)",
        ("tests/triton/test_tiles.py", "-k", "ties"), "triton",
    ),
    Fault(
        "kernel: hidden states of ignored rows", KERNELS + "sums.py",
        "copied = tl.where(excluded, zero, h.to(selected.dtype.element_ty))",
        "copied = h.to(selected.dtype.element_ty)",
        ("tests/triton/test_means.py", SKIPPED, "tests/triton/test_product.py", "-k", "cancelling or statistics"),
        "triton",
    ),
    Fault(
        "kernel: bias of the target", KERNELS + "sums.py",
        "z += optional(bias, y, owned, 0.0)", "z += 0.0",
        (MATRIX, "-k", "bias and (float16 or bfloat16)"), "triton",
    ),
    Fault(
        "kernel: gradients not scaled", KERNELS + "sums.py",
        "mask=inside, other=0.0).to(tl.float32) * factor",
        "mask=inside, other=0.0).to(tl.float32)",
        ("tests/triton/test_rows.py", "-k", "both_factors"), "triton",
    ),
    Fault(
        "kernel: divisor without class weights", KERNELS + "sums.py",
        "weighted = a * optional(rows.class_weight, tl.where(of_rows != 0, row, y), row < count, 1.0)", "weighted = a",
        (MATRIX, "-k", "weight and mean"), "triton",
    ),
    Fault(
        "kernel: float16 gradients without the size of a scale", KERNELS + "sums.py",
        "tl.max(sizes, 0) * scale", "tl.max(sizes, 0)",
        ("tests/test_numbers.py", "-k", "before_the_division"), "triton",
    ),
    Fault(
        "kernel: shares without smoothing", KERNELS + "fold.py",
        "(weights[3] * q + weights[4]) * share", "weights[3] * q * share",
        ("tests/triton/test_probabilities.py", MATRIX, "-k", "probabilities and smoothing"), "triton",
    ),
    Fault(
        "kernel: target outside its support", KERNELS + "algebra.py",
        'gamma = tl.where(nll == float("inf"), 0.0, gamma)', "gamma = gamma * 1.0", (ROWS, LOG_PROBS), "triton",
    ),
    Fault(
        "kernel: ranks beside tiles", "backends/torch/sources.py",
        ' and "rank" not in setting.call.options.stats', "", ("tests/triton/test_tiles.py", "-k", "ranks"), "triton",
    ),
    Fault(
        "kernel: any of equal logits among the largest", KERNELS + "largest_kernels.py",
        "(equal & (equals <= missing))", "equal", (TOP_K, "-k", "equal"), "triton",
    ),
    Fault(
        "kernel: reverse divergence without its mean", KERNELS + "divergence_kernel.py",
        "p - q if FORWARD else times(p, pull - v)", "p - q if FORWARD else times(p, -v)",
        ("tests/triton/test_divergence_blocks.py",), "triton",  # in one block the offset is the mean
    ),
    Fault(
        "kernel: total variation with its gradient turned", KERNELS + "divergence_kernel.py",
        "v = tl.where(apart > 0, 0.5, tl.where(apart < 0, -0.5, 0.0))",
        "v = tl.where(apart > 0, -0.5, tl.where(apart < 0, 0.5, 0.0))", (DIVERGENCE, "-k", "tv"), "triton",
    ),
]  # fmt: skip

SAMPLE = (
    "smoothing without the target's own share",
    "packed numbers rounded",
    "retained graph overwritten",
    "heads without their divisors",
    "entropy of ranks not rebased",
)
"""A few faults, of different parts, that `nox` plants each time."""


def plant(fault: Fault, folder: Path) -> None:
    """Copy the package to `folder`/xent with the fault."""
    shutil.copytree(SOURCE, folder / "xent", ignore=shutil.ignore_patterns("__pycache__"))
    place = folder / "xent" / fault.file
    text = place.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has its text {text.count(fault.old)} times")
    place.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def is_found(fault: Fault) -> bool:
    """Return whether the tests of a fault fail. An error of collection is no failure: it raises RuntimeError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(fault, folder)
        environment = os.environ | {
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "XENT_TEST_BACKENDS": fault.backend,
            "XENT_TEST_FULL": "0",  # bare nox must find it
        }
        environment.pop("TRITON_INTERPRET", None)
        if fault.backend == "triton":
            environment["TRITON_INTERPRET"] = "1"
        imported = [sys.executable, "-c", "import xent; print(xent.__file__)"]
        where = subprocess.run(imported, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
        if not where.startswith(str(folder)):
            raise RuntimeError(f"tests would import {where.strip()}, not the copy with the fault")
        program = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests]
        try:
            run = subprocess.run(
                program, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            return True
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{fault.name}: pytest ends with {run.returncode}\n{run.stdout[-2000:]}")
    return run.returncode == 1


def main(*parts: str) -> int:
    """Plant the faults whose names contain one of `parts`, or all. Return the number that is not found."""
    chosen = [fault for fault in FAULTS if not parts or any(part in fault.name for part in parts)]
    missed = 0
    for fault in chosen:
        try:
            found = is_found(fault)
            print(f"{'found' if found else 'MISSED'}  {fault.name} ({fault.file})", flush=True)
        except (RuntimeError, ValueError) as error:
            found = False
            print(f"ERROR  {error}", flush=True)
        missed += not found
    print(f"{len(chosen) - missed} of {len(chosen)} faults are found")
    return missed


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
