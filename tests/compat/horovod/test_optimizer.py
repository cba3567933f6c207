"""`DistributedOptimizer` against one process with the whole batch."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from ranks import run_distributed
from torch import nn

import toolkit.compat.horovod as hvd
from toolkit.compat.horovod.errors import HorovodInternalError, HorovodOrderError, HorovodValueError, NotBuiltError

SIZE = 2
ROWS = 4  # of a rank's batch
STEPS = 4
pytestmark = pytest.mark.gloo

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def dense(
    kind: str, *, ranks=lambda step: range(SIZE), passes: int = 1, clip: float | None = None
) -> list[torch.Tensor]:
    """The weights of one process, whose loss is the mean over all ranks' batches; of a rank that has none, zero."""
    net = model()
    optimizer = OPTIMIZERS[kind](net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in range(passes):
            for rank in ranks(step):
                (loss_of(net, batch(step * passes + each, rank)) / SIZE).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return [value.detach() for value in net.parameters()]


def distributed(kind: str, rank: int, *, steps: int = STEPS, passes: int = 1, clip=None, named=True, **options):
    net = model()
    if rank:
        with torch.no_grad():
            for value in net.parameters():
                value.zero_()
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    given = {"named_parameters": net.named_parameters()} if named else {}
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](net.parameters()), **given, backward_passes_per_step=passes, **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        for each in range(passes):
            loss_of(net, batch(step * passes + each, rank)).backward()
        if clip is None:
            optimizer.step()
        else:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
    return [value.detach() for value in net.parameters()]


def same(got, expected, **tolerance) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@case
def equals_dense(rank):
    for kind in OPTIMIZERS:
        same(distributed(kind, rank), dense(kind))


@case
def options_that_change_no_result(rank):
    expected = dense("sgd")
    same(distributed("sgd", rank, named=False), expected)
    same(distributed("sgd", rank, gradient_predivide_factor=4.0), expected)
    same(distributed("sgd", rank, groups=2), expected)
    parameters = list(model().parameters())
    assert len(parameters) == 6
    same(distributed("sgd", rank, num_groups=100), expected)


@case
def fp16_compression(rank):
    """Each gradient is rounded to fp16 before and after the sum."""
    got, expected = distributed("sgd", rank, compression=hvd.Compression.fp16), dense("sgd")
    same(got, expected, rtol=5e-3, atol=5e-3)
    assert any(not torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@case
def several_backward_passes(rank):
    for kind in OPTIMIZERS:
        same(distributed(kind, rank, passes=2), dense(kind, passes=2))


@case
def clipped_between_synchronize_and_step(rank):
    same(distributed("sgd", rank, clip=0.1), dense("sgd", clip=0.1))


@case
def scaled_losses(rank):
    """Gradients are unscaled between synchronize and step; a step with one that is not finite is left out on all ranks."""
    net = model().float()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()), net.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, batch(step, rank).float()) * (float("inf") if (step, rank) == (1, 0) else 1.0)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    alone = model()
    sgd = OPTIMIZERS["sgd"](alone.parameters())
    for step in (0, 2, 3):
        sgd.zero_grad()
        for other in range(SIZE):
            (loss_of(alone, batch(step, other)) / SIZE).backward()
        sgd.step()
    same(
        [value.detach().double() for value in net.parameters()],
        [value.detach() for value in alone.parameters()],
        rtol=1e-4,
        atol=1e-5,
    )


@case
def sum_of_gradients(rank):
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), op=hvd.Sum)
    loss_of(net, batch(0, rank)).backward()
    optimizer.synchronize()
    alone = model()
    for other in range(SIZE):
        loss_of(alone, batch(0, other)).backward()
    same([value.grad for value in net.parameters()], [value.grad for value in alone.parameters()])


@case
def uneven_batches(rank):
    """Rank 1 has one batch fewer than rank 0: it joins and contributes zeros."""
    got = distributed("sgd", rank, steps=STEPS - rank)
    assert hvd.join() == 0
    if rank == 0:
        same(got, dense("sgd", ranks=lambda step: range(SIZE if step < STEPS - 1 else 1)))


@case
def parameters_that_some_ranks_do_not_use(rank):
    """Ranks go through other branches, in other orders: what is not used contributes zeros."""
    branches = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    hvd.broadcast_parameters(branches.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(branches.parameters(), lr=0.1), branches.named_parameters())
    x = torch.ones(1, 2)
    order = (0, 1) if rank == 0 else (1,)
    for index in order:
        x = branches[index](x)
    x.sum().backward()
    optimizer.synchronize()
    every = hvd.allgather(torch.cat([value.grad.flatten() for value in branches.parameters()])[None])
    assert torch.equal(every[0], every[1])
    assert branches[2].weight.grad.abs().sum() == 0
    assert branches[0].weight.grad.abs().sum() > 0


@case
def sparse_gradients(rank):
    for dense_too in (False, True):
        table = nn.Embedding(4, 2, sparse=True)
        hvd.broadcast_parameters(table.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=dense_too
        )
        before = table.weight.detach().clone()
        table(torch.tensor([rank, 3])).sum().backward()
        optimizer.step()
        moved = torch.tensor([0.5, 0.5, 0.0, 1.0])[:, None].expand(4, 2)
        torch.testing.assert_close(before - table.weight.detach(), moved)


@case
def a_sparse_parameter_that_some_rank_does_not_use(rank):
    table = nn.Embedding(4, 2, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters())
    if rank == 0:
        table(torch.tensor([1])).sum().backward()
    with pytest.raises(HorovodInternalError, match="the operation is allgather on rank 0 and allreduce on rank 1"):
        optimizer.step()  # rank 1 cannot know that its gradient would be sparse
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    for step in range(2):
        before = table.weight.detach().clone()
        if rank == 0 or step == 0:
            table(torch.tensor([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (before - table.weight.detach())[:, 0].tolist() == pytest.approx([0.0, 1.0 - step / 2, 0.0, 0.0])


@case
def ranks_of_a_process_set(rank):
    alone = hvd.add_process_set([0])
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), process_set=alone
    )
    loss_of(net, batch(0, rank)).backward()
    optimizer.step()
    dense_net = model()
    loss_of(dense_net, batch(0, rank)).backward()
    same([value.grad for value in net.parameters()], [value.grad for value in dense_net.parameters()])


@case
def optimizer_states_of_rank_0(rank):
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5 if rank else 0.01, amsgrad=True)
    if rank == 0:
        loss_of(net, batch(0, 0)).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert len(states) == 6 * 4
    assert float(optimizer.state[net[0].weight]["step"]) == 1
    every = hvd.allgather(torch.cat([value.flatten().double() for value in states])[None])
    assert torch.equal(every[0], every[1])


@case
def schedules_and_scalers_take_it_for_the_optimizer(rank):
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loss_of(net, batch(0, rank)).backward()
    optimizer.step()
    every = hvd.allgather(net[0].weight.detach()[None])
    assert torch.equal(every[0], every[1]), "a schedule made before replaces the step of its own optimizer alone"
    inner.step()
    before.step()
    after.step()
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.25
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    optimizer.step(lambda: loss_of(net, batch(1, rank)).backward())
    every = hvd.allgather(net[0].weight.detach()[None])
    assert torch.equal(every[0], every[1]), "gradients of a closure are reduced too"


@case
def parameters_that_are_wrapped_again(rank):
    net = model()
    for phase in range(2):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        optimizer.zero_grad()
        loss_of(net, batch(phase, rank)).backward()
        optimizer.step()
    every = hvd.allgather(net[0].weight.detach()[None])
    assert torch.equal(every[0], every[1])


@case
def wrong_orders(rank):
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    loss_of(net, batch(0, rank)).backward()
    with pytest.raises(HorovodOrderError, match="HOROVOD_ZERO_GRAD"):
        optimizer.zero_grad()
    with pytest.raises(HorovodOrderError, match=r"backward_passes_per_step=1 .*HOROVOD_BACKWARD_PASSES"):
        loss_of(net, batch(0, rank)).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        loss_of(net, batch(0, rank)).backward()
    optimizer.step()
    with pytest.raises(HorovodValueError, match="DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer)


@case
def batch_norm(rank):
    """Of uneven batches, against one process with all rows."""
    x = torch.randn(7, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = torch.linspace(-1, 2, x.numel(), dtype=torch.float64).view_as(x)
    mine = slice(0, 5) if rank == 0 else slice(5, 7)
    one, many = nn.BatchNorm1d(3).double(), hvd.SyncBatchNorm(3).double()
    whole, part = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
    expected, got = one(whole), many(part)
    torch.testing.assert_close(got, expected[mine])
    (expected * weights).sum().backward()
    (got * weights[mine]).sum().backward()
    torch.testing.assert_close(part.grad, whole.grad[mine])
    torch.testing.assert_close(hvd.allreduce(many.weight.grad, op=hvd.Sum), one.weight.grad)
    torch.testing.assert_close(hvd.allreduce(many.bias.grad, op=hvd.Sum), one.bias.grad)
    torch.testing.assert_close(many.running_mean, one.running_mean)
    torch.testing.assert_close(many.running_var, one.running_var)
    torch.testing.assert_close(many.eval()(part), one.eval()(whole)[mine])


def run_cases(rank: int) -> dict[str, str]:
    os.environ["HOROVOD_CYCLE_TIME"] = "0.1"
    hvd.init()
    for name, function in CASES.items():
        try:
            function(rank)
        except BaseException as error:
            return {name: repr(error)}
    hvd.shutdown()
    return {}


def test_training_equals_one_process_with_the_whole_batch():
    assert run_distributed(run_cases, SIZE, timeout_seconds=120) == [{}] * SIZE


def test_arguments():
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    pairs = list(net.named_parameters())
    wrong = [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0 is below 1"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor=2.0 with op=Sum"),
        ({"op": hvd.Min}, "does not combine gradients"),
        ({"named_parameters": net.parameters()}, "Give model.named_parameters"),
        ({"named_parameters": pairs[:-1]}, "no name for parameter 5 of group 0"),
        ({"named_parameters": [("a", value) for _, value in pairs]}, "has a twice"),
        ({"groups": -1}, "groups=-1 is below 0"),
    ]
    hvd.init()
    try:
        for options, told in wrong:
            with pytest.raises(HorovodValueError, match=told):
                hvd.DistributedOptimizer(sgd, **options)
        for optimizer, options in ((sgd, {"op": hvd.Adasum}), (torch.optim.LBFGS(net.parameters()), {})):
            with pytest.raises(NotBuiltError, match="HOROVOD_NOT_BUILT"):
                hvd.DistributedOptimizer(optimizer, **options)
    finally:
        hvd.shutdown()
