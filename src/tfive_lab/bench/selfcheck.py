"""`tfive bench selfcheck`: every fast path of this device against the slow path it must equal, on small random models.

The reference is plain rows through the stock model in float32 (and the tree by masked attention, which must equal it).
Paths that need a GPU are listed as skipped elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tfive.models.precision import choose_device
from tfive.tree.fast.agreement import KERNEL_BOUNDS
from tfive.tree.fast.delta_kernel import triton_differences
from tfive.tree.fast.delta_kernel import triton_trouble as rule_trouble
from tfive.tree.fast.delta_step import RecurrentHeads
from tfive.tree.fast.delta_step_choice import all_differences, choose_step, step_trouble
from tfive.tree.fast.fused import TritonOps, differences, list_differences, list_trouble, triton_trouble
from tfive.tree.fast.hf_fused import AttentionPart
from tfive.tree.fast.hf_training import block_shapes
from tfive.tree.fast.tiled import differences as tiled_differences
from tfive.tree.fast.tiled import tiled_trouble
from tfive.tree.fast.training_ops import TritonTraining
from tfive.tree.fast.training_ops import differences as training_differences
from tfive.tree.head import log_normaliser, normaliser_kernel
from tfive.tree.recurrent.delta_rule import read_paths, unit_rows
from tfive.tree.settings import Attention, EngineOptions, SamplingSettings, Switch
from tfive_lab.bench.checks import BFLOAT16, FLOAT32, KL, Check, Outputs, gap, of_tree, relative
from tfive_lab.bench.head_checks import head_checks
from tfive_lab.bench.phases import TreePhases, tree_phases
from tfive_lab.bench.plain_rows import PlainRows
from tfive_lab.bench.replayed_checks import replayed_passes, replayed_updates
from tfive_lab.bench.work import Work, random_model, value_head

MODELS: dict[str, dict[str, Any]] = {
    "attention": {
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    },
    "hybrid": {
        "model_type": "qwen3_5_text",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    },
}
WORK = Work(texts=2, tokens=100, positions=4, length=6, checkpoints=(2, 6), horizon=8, group=2)


def _of_rows(model: PreTrainedModel, side: TreePhases, tokens_QT: Tensor) -> Outputs:
    path = PlainRows(model, side.texts, side.plan)
    none_Q, loss_QK = path.score(tokens_QT, 8)
    model.zero_grad(set_to_none=True)
    log_prob_QT = path.policy(tokens_QT, 8, 1 / tokens_QT.numel())
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    values = path.values(tokens_QT, value_head, 8)
    return Outputs(log_prob_QT, torch.cat([none_Q[:, None], loss_QK], 1), values, gradients)


def _engine_checks(kind: str, device: torch.device) -> Iterator[Check]:
    model = random_model(MODELS[kind], device, torch.float32)
    eager = EngineOptions(attention="sdpa", delta_rule="torch", fused_blocks="off", cuda_graphs=False)
    side = tree_phases(model, WORK, eager)
    thoughts = side.sampling()
    tokens_QT = thoughts.tokens_BRT.flatten(0, 1)
    reference, rows = of_tree(side), _of_rows(model, side, tokens_QT)
    yield Check(kind, "masked attention against plain rows", reference.apart(rows), FLOAT32)
    yield Check(kind, "its gradients, relative", relative(reference.gradients, rows.gradients), 1e-3)

    cuda = device.type == "cuda"
    yield from _attention(kind, "folded", side, reference)
    if kind == "attention" and cuda:
        yield from _attention(kind, "flex", side, reference)
    elif kind == "attention":
        yield Check(kind, "flex attention", None, None, "no backward pass on this device")

    yield from _kernels(kind, side, reference)
    yield from _training(kind, side, reference)
    fast = tree_phases(model, WORK, EngineOptions())
    again = fast.sampling()
    how = "captured sampling" if cuda else "sampling by default settings"
    same = float((again.tokens_BRT != thoughts.tokens_BRT).float().mean())
    yield Check(kind, f"{how}: share of other tokens", same, 0.02)
    yield Check(kind, f"{how}: log q against the policy", gap(again.log_q_BRT.flatten(0, 1), fast.actor()), FLOAT32)
    yield from replayed_passes(kind, side, WORK, reference)
    yield from replayed_updates(kind, side)
    yield from _parity(kind, side)
    yield from _half(kind, device, reference, thoughts)


def _attention(kind: str, attention: Attention, side: TreePhases, reference: Outputs) -> Iterator[Check]:
    """Another attention kernel against masked attention."""
    other = tree_phases(side.model, WORK, replace(side.engine, attention=attention))
    other.thoughts = side.thoughts
    try:
        found = of_tree(other)
    except Exception as error:
        # FlexAttention is compiled, and a compiler may be missing or fail in any way: what it said is reported.
        if attention != "flex":
            raise
        yield Check(kind, "flex attention", None, None, f"cannot run: {type(error).__name__}: {error}"[:200])
        return
    yield Check(kind, f"{attention} attention", found.apart(reference), FLOAT32)
    yield Check(kind, f"{attention} gradients, relative", relative(found.gradients, reference.gradients), 1e-3)


def _kernels(kind: str, side: TreePhases, reference: Outputs) -> Iterator[Check]:
    """Fused blocks against the model's own, and every Triton kernel they use against PyTorch at the model's heads."""
    device = side.tree.device
    setting: Switch = "auto" if device.type == "cuda" else "on"
    fused = tree_phases(side.model, WORK, replace(side.engine, fused_blocks=setting))
    fused.thoughts = side.thoughts
    choice = fused.tree.fusion
    if choice.fusion is None:
        yield Check(kind, "fused blocks", None, None, f"not used: {choice.reason}")
        return
    yield Check(kind, "fused blocks", of_tree(fused).apart(reference), FLOAT32, choice.reason)
    parts = [block.mixer for block in choice.fusion.blocks]
    heads = next(part.heads for part in parts if isinstance(part, AttentionPart))
    for dtype in KERNEL_BOUNDS:
        trouble = triton_trouble(heads, device, dtype)
        name = f"kernels in {str(dtype).removeprefix('torch.')}, relative"
        if device.type != "cuda":
            yield Check(kind, name, None, None, f"not used: {trouble}")
            continue
        yield _each(kind, name.removesuffix(", relative"), differences(TritonOps(), heads, device, dtype), dtype)
        trouble, name = list_trouble(heads, device, dtype), name.replace("kernels", "sampling lists")
        if trouble is None:
            apart = list_differences(TritonOps(), heads, device, dtype)
            yield _each(kind, name.removesuffix(", relative"), apart, dtype)
        else:
            yield Check(kind, name, None, None, f"not used: {trouble}")
    if device.type == "cuda":
        logits_xV = 5 * torch.randn(64, 151_936, generator=torch.Generator().manual_seed(0)).to(device)
        wanted = logits_xV.double().logsumexp(-1)
        used = "the kernel" if normaliser_kernel(device) else "PyTorch"
        yield Check(kind, "log-normaliser", gap(log_normaliser(logits_xV), wanted), 1e-5, used)


def _training(kind: str, side: TreePhases, reference: Outputs) -> Iterator[Check]:
    """Trained blocks and the head they come with against the model's own, gradients included, then each training kernel
    and tiled attention against PyTorch at the model's shape."""
    device = side.tree.device
    setting: Switch = "auto" if device.type == "cuda" else "on"
    trained = tree_phases(side.model, WORK, replace(side.engine, fused_blocks=setting, fused_training=setting))
    trained.thoughts = side.thoughts
    choice, fusion = trained.tree.training, trained.tree.fusion.fusion
    if choice.forwards is None or fusion is None:
        yield Check(kind, "trained blocks", None, None, f"not used: {choice.reason}")
    else:
        found = of_tree(trained)
        yield Check(kind, "trained blocks", found.apart(reference), FLOAT32, choice.reason)
        yield Check(kind, "their gradients, relative", relative(found.gradients, reference.gradients), 1e-3)
    shapes = [] if fusion is None else block_shapes(fusion, trained.tree.backbone)
    for dtype in KERNEL_BOUNDS:
        called = str(dtype).removeprefix("torch.")
        heads = trained.tree.backbone.heads
        trouble = "its heads are not told by its config" if heads is None else tiled_trouble(*heads, device, dtype)
        if device.type != "cuda" or heads is None or trouble is not None:
            yield Check(kind, f"tiled attention in {called}", None, None, f"not used: {trouble}")
        else:
            yield _each(kind, f"tiled attention in {called}", tiled_differences(*heads, device, dtype), dtype)
        for shape in shapes if device.type == "cuda" else []:
            apart = training_differences(TritonTraining(), shape, device, dtype)
            yield _each(kind, f"training kernels in {called}", apart, dtype)


def _each(kind: str, name: str, apart: dict[str, float], dtype: torch.dtype) -> Check:
    """The largest of several relative differences, with all of them in the note."""
    note = ", ".join(f"{what} {size:.1e}" for what, size in apart.items())
    return Check(kind, f"{name}, relative", max(apart.values()), KERNEL_BOUNDS[dtype], note)


def _parity(kind: str, side: TreePhases) -> Iterator[Check]:
    """In parity mode sampling and training compute the same numbers, to the last bit."""
    side.law = SamplingSettings(parity=True)
    thoughts = side.tree.sample(side.texts, side.uniforms_BRT, side.law)
    with torch.no_grad():
        policy = side.tree.policy(side.texts, thoughts, parity=True).log_prob_BRT
    if policy is None:
        raise RuntimeError("policy gave no log-probabilities")
    yield Check(kind, "parity mode: log q against the policy", gap(thoughts.log_q_BRT, policy), 0.0)


def _half(kind: str, device: torch.device, reference: Outputs, thoughts: Any) -> Iterator[Check]:
    half = random_model(MODELS[kind], device, torch.float32).bfloat16()
    side = tree_phases(half, WORK, EngineOptions())
    side.thoughts = thoughts
    found = of_tree(side)
    mean = float((found.log_prob_QT - reference.log_prob_QT).abs().mean())
    yield Check(kind, "bfloat16 against float32", found.apart(reference), BFLOAT16, f"mean |Δ log-prob| {mean:.4f}")
    hidden_xD = torch.randn(8, side.tree.width, generator=torch.Generator().manual_seed(0)).to(device).bfloat16()
    exact = half.get_output_embeddings().weight.double()
    slopes = []
    for logits in (side.tree.head.logits, lambda hidden: hidden.double() @ exact.t()):
        hidden = hidden_xD.clone().requires_grad_()
        slopes.append(torch.autograd.grad(logits(hidden).log_softmax(-1)[:, 0].sum(), hidden)[0])
    yield Check(kind, "bfloat16 head by autograd, relative", relative(slopes[:1], slopes[1:]), 0.02)
    sampled = side.sampling().log_q_BRT.flatten(0, 1)
    off = (side.actor() - sampled).double()
    kl = float((off.exp() - 1 - off).mean())
    yield Check(
        kind, "bfloat16 mismatch KL of sampling and training", kl, KL, f"mean |d| {float(off.abs().mean()):.4f}"
    )


def _rule_checks(device: torch.device) -> Iterator[Check]:
    """Our delta rule on the device in float32 against the CPU in float64, with gradients; then Triton's against it."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 200, 4)
    query, key, value = (torch.randn(*shape, 64, generator=generator, dtype=torch.float64) for _ in range(3))
    decay = -torch.rand(shape, generator=generator, dtype=torch.float64)
    beta = torch.rand(shape, generator=generator, dtype=torch.float64)
    exact = [unit_rows(query) / 8, unit_rows(key), value, decay, beta]
    results = []
    for place, dtype in ((torch.device("cpu"), torch.float64), (device, torch.float32)):
        inputs = [x.to(place, dtype).requires_grad_() for x in exact]
        output, trace = read_paths(*inputs)
        forks = trace.state_after(torch.arange(4, device=place), torch.tensor([3, 64, 131, 200], device=place))
        grads = torch.autograd.grad(output.square().sum() + forks.square().sum(), inputs)
        results.append([x.detach().cpu() for x in (output, forks, *grads)])
    yield Check("delta rule", "PyTorch rule, relative", relative(results[1], results[0]), 1e-5)
    yield from _recurrent_kernels(RecurrentHeads(2, 4, 64, 64, 3), device, KERNEL_BOUNDS)
    yield from _recurrent_kernels(
        RecurrentHeads(16, 16, 128, 128, 3), device, {torch.bfloat16: KERNEL_BOUNDS[torch.bfloat16]}
    )


def _recurrent_kernels(
    heads: RecurrentHeads, device: torch.device, bounds: dict[torch.dtype, float]
) -> Iterator[Check]:
    """Triton's kernels of recurrent layers against PyTorch: the sampling step, the rule and what stands around it."""
    for dtype, bound in bounds.items():
        kind = str(dtype).removeprefix("torch.")
        what, name = (
            "recurrent layers",
            f"kernels for {heads.values} heads of {heads.value_features} in {kind}, relative",
        )
        trouble = step_trouble(heads, device, dtype, True) or rule_trouble(heads, device, dtype)
        if device.type != "cuda" or (trouble and "imported" in trouble):
            yield Check(what, name, None, None, f"not used: {trouble}")
            continue
        kernel, _ = choose_step(heads, device, dtype, once=True)
        apart = {} if kernel is None else all_differences(kernel, heads, device, dtype, True)
        apart = {f"step: {key}": size for key, size in apart.items()}
        if rule_trouble(heads, device, dtype) is None:
            apart |= {f"rule: {key}": size for key, size in triton_differences(heads, device, dtype, True).items()}
        note = ", ".join(f"{key} {size:.1e}" for key, size in apart.items())
        worst = max(apart.values(), default=0.0) if trouble is None else float("inf")
        yield Check(what, name, worst, bound, note if trouble is None else f"not used: {trouble}; {note}")


def selfcheck(device: str = "auto", keep: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """All checks on `device`: what was compared, how far apart at most, whether within bounds. `keep` gets the report
    after each; until the last it is not ok."""
    place = choose_device(device)
    engines = (check for kind in MODELS for check in _engine_checks(kind, place))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "ok": False,
        "checks": [],
    }
    for check in chain(_rule_checks(place), head_checks(place), engines):
        report["checks"].append({**asdict(check), "ok": check.ok})
        if keep is not None:
            keep(report)
    return report | {"ok": all(check["ok"] for check in report["checks"])}


def render(report: dict[str, Any]) -> str:
    """One line a check."""
    lines = [f"{report['device']} · torch {report['versions']['torch']}"]
    for check in report["checks"]:
        if check["bound"] is None:
            lines.append(f"  –     {check['model']}: {check['name']}: {check['note']}")
            continue
        note = f" ({check['note']})" if check["note"] else ""
        verdict = "ok   " if check["ok"] else "WRONG"
        size = f"{check['max_abs_diff']:.2e} (bound {check['bound']:.0e})"
        lines.append(f"  {verdict} {check['model']}: {check['name']}: {size}{note}")
    return "\n".join(lines)
