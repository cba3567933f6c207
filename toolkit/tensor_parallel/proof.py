"""Proof of a derived table: a twin of the model runs whole and sharded, and loss, scores and every gradient are compared.

What does not stand the comparison is tried in its next way, or stays whole on each rank, until the twin's shards are the
twin; a model for which too little is left is refused with the module where the two part ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.artifacts.records import Records
from toolkit.config.job import ExpertSharding
from toolkit.distributed.thread_ranks import run_threads
from toolkit.errors import ToolkitError, first_line
from toolkit.tensor_parallel.apply import apply_tensor_parallel, parameter_shards
from toolkit.tensor_parallel.derive import Candidate, find_candidates, heads_of
from toolkit.tensor_parallel.embedding import gather_scores
from toolkit.tensor_parallel.linear import ShardedLinear
from toolkit.tensor_parallel.plan import Style, TPPlan, has_whole_experts, matching, with_whole_experts
from toolkit.twins.comparison import (
    ROUNDING,
    SMALL,
    TOLERANCE,
    NoTwinError,
    Run,
    build_twin,
    copy_of,
    difference,
    make_batch,
    module_kinds,
    plain_torch,
    run,
)
from toolkit.twins.kept import kept_proof

# Least share of the parameters outside the vocabulary that ranks must share, for a table to be of use.
LEAST_SHARDED = 0.1
_MOST_TRIALS = 24
# Why experts cannot be whole on ranks of a dense model, or of one that keeps each expert in a module of its own.
NO_EXPERTS = "it has no stacked experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorProof:
    """What the comparison of a twin and its shards showed.

    Args:
        table: Styles that were proven, by pattern; empty if the model is refused.
        difference: Largest difference from the twin: of loss and scores, and of gradients as a share of their largest element.
        sharded: Share of the twin's parameters outside the vocabulary that the ranks share.
        whole: Modules that could not be sharded, each with the reason.
        kinds: Patterns and classes of the twin's modules: of a model that has others, the twin has proven nothing.
        problem: Why the model is refused; "" if it is not.
    """

    table: Mapping[str, Style]
    difference: float
    sharded: float
    whole: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...]
    problem: str


def tensor_proof(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    num_ranks: int,
    experts: ExpertSharding = "sliced",
) -> TensorProof:
    """Return the proof of a model's derived table, made now or by an earlier process; arguments as of `prove_tensor`."""
    ranks = ranks_of_proof(config, num_ranks)
    return kept_proof(
        "tensor",
        model_class,
        config,
        ranks,
        *(() if experts == "sliced" else (experts,)),
        records=_records(),
        make=lambda: prove_tensor(model_class, config, num_ranks=ranks, experts=experts),
    )


def sequence_proof(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, table: Mapping[str, Style], *, num_ranks: int
) -> str:
    """Return why a proven table does not hold when ranks also share the sequence; "" if it does."""
    ranks = ranks_of_proof(config, num_ranks)

    def make() -> str:
        with plain_torch():
            trial = _try(_Scene(build_twin(model_class, config), num_ranks=ranks, pieces=True), table)
            return "" if trial.place is None else f"{trial.place}: {trial.reason}"

    return kept_proof("sequence", model_class, config, ranks, repr(table), records=Records(str), make=make)


@cache
def _records() -> Records[TensorProof]:
    return Records(TensorProof)


def prove_tensor(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    num_ranks: int,
    experts: ExpertSharding = "sliced",
) -> TensorProof:
    """Derive a table for a model and prove it on a twin.

    Args:
        model_class: Class of the model.
        config: Its configuration.
        num_ranks: Tensor ranks; more than four are proven over two or four, which share heads in the same way.
        experts: Whether ranks share each of the stacked experts, or have some of them whole.
    """
    with plain_torch():
        try:
            twin = build_twin(model_class, config)
            scene = _Scene(twin, num_ranks=ranks_of_proof(config, num_ranks), pieces=False)
            candidates = find_candidates(copy_of(twin), scene.batch)
        except NoTwinError as error:
            return _refused(str(error))
        except Exception as error:  # code of any model
            return _refused(f"its twin does not run on the CPU: {type(error).__name__}: {first_line(error)}")
        if experts == "sliced":
            return _search(scene, candidates)
        placed = [
            replace(candidate, tables=tuple(map(with_whole_experts, candidate.tables))) for candidate in candidates
        ]
        proof = _search(scene, placed)
        if proof.problem or has_whole_experts(proof.table):
            return proof
        stacked = {candidate.pattern for candidate in placed if any(map(has_whole_experts, candidate.tables))}
        whys = [
            f"{name}, whose experts would each be whole on a rank: {why}"
            for name, why in proof.whole
            if name in stacked
        ]
        return _refused(whys[0] if whys else NO_EXPERTS, proof.whole)


class _Scene:
    """A twin that has never run, and what it does whole.

    Args:
        twin: The twin.
        num_ranks: Ranks that share it.
        pieces: Whether they share the sequence too.
    """

    def __init__(self, twin: PreTrainedModel, *, num_ranks: int, pieces: bool) -> None:
        self.twin, self.num_ranks, self.pieces = twin, num_ranks, pieces
        self.batch = make_batch()
        self.wanted = run(copy_of(twin), self.batch)
        self.heads = heads_of(twin.config)

    def in_double(self) -> bool:
        """Change to double precision, in which differences are not rounding; return whether the twin can."""
        if self.twin.dtype == torch.float64:
            return False
        twin = copy_of(self.twin).double()
        try:
            self.wanted = run(copy_of(twin), self.batch)
        except NoTwinError:  # some models mix in tensors of single precision
            return False
        self.twin = twin
        return True


def ranks_of_proof(config: PreTrainedConfig, num_ranks: int) -> int:
    """Return 2 where ranks have whole key heads or share the only one, else 4."""
    key_value = heads_of(config).key_value
    return 2 if key_value == 1 or key_value % num_ranks == 0 or num_ranks < 4 else 4


def _search(scene: _Scene, candidates: Sequence[Candidate]) -> TensorProof:
    """Try tables until one stands the comparison: of the module where they part ways the next way, or none."""
    chosen = {candidate.pattern: 0 for candidate in candidates}
    of_pattern = {candidate.pattern: candidate for candidate in candidates}
    whole: list[tuple[str, str]] = []
    for _ in range(_MOST_TRIALS):
        table: dict[str, Style] = {}
        for pattern, way in chosen.items():
            table.update(of_pattern[pattern].tables[way])
        table = {name: style for name, style in table.items() if matching(scene.twin, name)}
        if not table:
            break
        trial = _try(scene, table)
        if trial.place is None:
            share = _sharded(scene, trial.shards)
            problem = "" if share >= LEAST_SHARDED else _too_little(share, whole)
            return TensorProof(
                table={} if problem else table,
                difference=trial.difference,
                sharded=share,
                whole=tuple(whole),
                kinds=module_kinds(scene.twin),
                problem=problem,
            )
        if trial.difference < ROUNDING and scene.in_double():
            continue
        blamed = _blamed(scene.twin, trial.place, chosen)
        if blamed is None:
            return _refused(f"at {trial.place or 'its end'}, {trial.reason}", whole)
        chosen[blamed] += 1
        if chosen[blamed] == len(of_pattern[blamed].tables):
            del chosen[blamed]
            whole.append((blamed or "vocabulary", trial.reason))
    return _refused(_too_little(0.0, whole), whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One comparison.

    Args:
        place: Name of the module where twin and shards part ways; None if they do not.
        reason: How they differ there.
    """

    place: str | None
    reason: str
    difference: float
    shards: Mapping[str, Any]


def _try(scene: _Scene, table: Mapping[str, Style]) -> _Trial:
    styles = TPPlan(heads=scene.heads, table=table)
    num_ranks = scene.num_ranks

    def on_rank(tp_group: dist.ProcessGroup) -> _Trial:
        model = apply_tensor_parallel(copy_of(scene.twin), styles, tp_group=tp_group, sequence_parallel=scene.pieces)
        found = run(model, scene.batch)
        if isinstance(model.get_output_embeddings(), ShardedLinear) and found.logits is not None:
            vocabulary = 0 if scene.wanted.logits is None else scene.wanted.logits.shape[-1]
            found.logits = gather_scores(found.logits, vocab_size=vocabulary, tp_group=tp_group)
        return _compare(model, found, scene.wanted, rank=tp_group.rank(), num_ranks=num_ranks)

    try:
        trials = run_threads(on_rank, num_ranks)
    except NoTwinError as error:
        place, _, reason = str(error).partition(": ")
        return _Trial(place=place, reason=reason, difference=float("inf"), shards={})
    except ToolkitError as error:
        problem = error.problems[0]
        return _Trial(place=problem.key, reason=problem.message, difference=float("inf"), shards={})
    except Exception as error:  # what a sharded model raises outside of a module
        return _Trial(
            place="", reason=f"{type(error).__name__}: {first_line(error)}", difference=float("inf"), shards={}
        )
    return max(trials, key=lambda trial: trial.difference)


def _compare(model: nn.Module, found: Run, wanted: Run, *, rank: int, num_ranks: int) -> _Trial:
    shards = parameter_shards(model)
    worst = abs(found.loss - wanted.loss) if found.loss == found.loss else float("inf")
    if found.logits is None or wanted.logits is None:
        worst = float("inf")
    else:
        worst = max(worst, difference(found.logits, wanted.logits))
    if not worst <= TOLERANCE:
        for name, output in wanted.outputs.items():
            other = found.outputs.get(name)
            if (
                other is not None
                and other.shape == output.shape
                and not (gap := difference(other, output)) <= TOLERANCE
            ):
                return _Trial(place=name, reason=f"its output differs by {gap:.1e}", difference=worst, shards=shards)
        return _Trial(place="", reason=f"loss and scores differ by {worst:.1e}", difference=worst, shards=shards)
    wrong: dict[str, float] = {}
    for name, gradient in wanted.gradients.items():
        own = found.gradients.get(name)
        scale = max(SMALL, gradient.abs().max().item())
        if name in shards:
            gradient = shards[name].take(gradient, rank=rank, num_ranks=num_ranks)
        gap = float("inf") if own is None else difference(own / scale, gradient / scale)
        worst = max(worst, gap)
        if not gap <= TOLERANCE:
            wrong[name] = gap
    if wrong:  # a wrong gradient spreads to what was called before: the last one called is at fault
        order = {name: place for place, name in enumerate(wanted.outputs)}
        name = max(wrong, key=lambda key: order.get(key.rpartition(".")[0], -1))
        return _Trial(
            place=name.rpartition(".")[0],
            reason=f"the gradient of {name} differs by {wrong[name]:.1e}",
            difference=worst,
            shards=shards,
        )
    return _Trial(place=None, reason="", difference=worst, shards=shards)


def _blamed(twin: nn.Module, place: str, chosen: Mapping[str, int]) -> str | None:
    """Return the pattern of the sharded module around a place, in it, or, for the end of the model, that of the vocabulary."""
    if place in chosen:  # what is refused for all modules of a pattern
        return place
    around = [
        pattern
        for pattern in chosen
        if pattern and any(place == name or place.startswith(f"{name}.") for name in matching(twin, pattern))
    ]
    if around:
        return max(around, key=len)
    inner = [
        pattern
        for pattern in chosen
        if pattern and place and any(name.startswith(f"{place}.") for name in matching(twin, pattern))
    ]
    if inner:
        return inner[-1]
    if "" in chosen:
        return ""
    return list(chosen)[-1] if chosen else None


def _sharded(scene: _Scene, shards: Mapping[str, Any]) -> float:
    """Return the share of the parameters that ranks share, of those that have a gradient and are not of the vocabulary."""
    twin = scene.twin
    ends = [end for end in (twin.get_input_embeddings(), twin.get_output_embeddings()) if end is not None]
    outer = {id(weight) for end in ends for weight in end.parameters()}
    inner = {
        name: weight.numel()
        for name, weight in twin.named_parameters()
        if id(weight) not in outer and name in scene.wanted.gradients
    }
    shared = sum(count for name, count in inner.items() if name in shards)
    return float(shared / max(1, sum(inner.values())))


def _too_little(share: float, whole: Sequence[tuple[str, str]]) -> str:
    parts = f"; {whole[0][0]}: {whole[0][1]}" if whole else ""
    return f"only {share:.0%} of its parameters outside the vocabulary can be shared by ranks{parts}"


def _refused(problem: str, whole: Sequence[tuple[str, str]] = ()) -> TensorProof:
    return TensorProof(table={}, difference=float("inf"), sharded=0.0, whole=tuple(whole), kinds=(), problem=problem)
