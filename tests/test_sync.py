"""Statistics over several processes on gloo, with unequal numbers of tokens."""

import copy
import pickle
from multiprocessing import set_forkserver_preload

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from norm_cases import DIM, batch, random_norm, train_step
from norm_cases import SPECS as ALL_SPECS
from small_models import built
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)  # fmt: skip
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from normkit import convert

SPECS = [
    "batch(sync=True)",
    "renorm(sync=True, warmup=2, r_until=4, d_until=4)",
    "mabn(sync=True, window=2, warmup=2, renorm_after=2)",
    "pnv(sync=True)",
    "power(sync=True, warmup=2)",
    "power(sync=True, groups=0, warmup=2)",
    "un(sync=True, window=2, warmup=2)",
    "un(sync=True, window=2, warmup=auto)",
    "repbn(sync=True)",
]
SIZES = (5, 2, 7)  # tokens a process
STEPS = 5

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without torch.distributed")


def shares(world: int, step: int) -> tuple[list, list, list]:
    """Return rows, gradients and masks of each process; the last row of each is padding."""
    xs = [batch(10 * step + r, n, DIM, scale=1 + r) for r, n in enumerate(SIZES[:world])]
    dys = [batch(500 + 10 * step + r, n, DIM) for r, n in enumerate(SIZES[:world])]
    masks = [torch.arange(n) < n - 1 for n in SIZES[:world]]
    return xs, dys, masks


def spawn(worker, world: int, tmp_path, *args) -> None:
    """Run `worker(rank, world, *args)` in processes that share one import of torch."""
    set_forkserver_preload(["normkit", "torch.distributed.fsdp"])
    torch.save(args, tmp_path / "arguments.pt")  # each tensor in `args` itself would be an open file
    mp.start_processes(_enter, (worker, world, tmp_path), world, start_method="forkserver")


def _enter(rank, worker, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        worker(rank, world, *torch.load(folder / "arguments.pt", weights_only=False))
    finally:
        dist.destroy_process_group()


def _each(rank, world, workers):
    """Run several workers in the same processes: it takes seconds to start them."""
    for worker, *given in workers:
        worker(rank, world, *given)


def one_process(spec: str, world: int) -> list[dict]:
    """Run the same steps in one process on the joint batch."""
    norm = random_norm(spec)
    return [train_step(norm, *(torch.cat(part) for part in shares(world, step))) for step in range(STEPS)]


def compare(got: dict, joint: dict, rank: int, grads: dict) -> None:
    """Compare one process with its share of the joint results; gradients are sums."""
    start = sum(SIZES[:rank])
    for name in ("y", "dx"):
        assert_close(got[name], joint[name][start : start + SIZES[rank]])
    for name, value in joint.items():
        if name in grads:
            assert_close(grads[name], value)
        elif name not in ("y", "dx"):
            assert_close(got[name], value, msg=lambda text, name=name: f"{name}: {text}")


def _train_in_process(rank, world, expected_steps):
    for spec, expected in expected_steps.items():
        norm = random_norm(spec)
        for step in range(STEPS):
            got = train_step(norm, *(part[rank] for part in shares(world, step)))
            grads = {f"d{name}": got[f"d{name}"].clone() for name, _ in norm.named_parameters()}
            for grad in grads.values():
                dist.all_reduce(grad)
            compare(got, expected[step], rank, grads)


def _ddp(rank, world, expected_steps, broadcast):
    for spec, expected in expected_steps.items():
        norm = random_norm(spec)
        model = DistributedDataParallel(norm, broadcast_buffers=broadcast)
        for step in range(STEPS):
            x, dy, mask = (part[rank] for part in shares(world, step))
            if step == 2:  # gradients are not synchronized here; statistics are
                with model.no_sync():
                    got = train_step(norm, x, dy, mask, call=model)
                assert_close(got["y"], expected[step]["y"][sum(SIZES[:rank]) : sum(SIZES[: rank + 1])])
                continue
            got = train_step(norm, x, dy, mask, call=model)
            compare(got, expected[step], rank, {f"d{n}": got[f"d{n}"] * world for n, _ in norm.named_parameters()})


def _fsdp(rank, world, expected_steps):
    start = sum(SIZES[:rank])
    for spec, expected in expected_steps.items():
        norm = random_norm(spec)
        fully_shard(norm, mesh=init_device_mesh("cpu", (world,)))
        for step in range(STEPS):
            x, dy, mask = (part[rank] for part in shares(world, step))
            leaf = x.clone().requires_grad_()
            norm.zero_grad()
            y = norm(leaf, mask)
            y.backward(dy)
            assert_close(y.detach(), expected[step]["y"][start : start + SIZES[rank]])
            assert_close(leaf.grad, expected[step]["dx"][start : start + SIZES[rank]])
            assert_close(norm.weight.grad.full_tensor() * world, expected[step]["dweight"])
            for name, buffer in norm.named_buffers():
                assert_close(buffer, expected[step][name])


def _fsdp_mixed(rank, world):
    norm = random_norm("un(sync=True, window=2, warmup=2)", dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    fully_shard(norm, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
    for step in range(3):
        y = norm(batch(step, 6, DIM, dtype=torch.float32))
        assert y.dtype is torch.bfloat16
    assert all(b.dtype in (torch.float32, torch.int64) for b in norm.buffers())


def _unsynchronised(rank, world):
    norm = random_norm("pnv")
    train_step(norm, *(part[rank] for part in shares(world, 0)))
    gathered = [torch.empty_like(norm.running) for _ in range(world)]
    dist.all_gather(gathered, norm.running)
    assert not torch.allclose(*gathered)


def _one_all_reduce_a_pass(rank, world):
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "all_reduce" in str(func):
                calls.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    norm = random_norm("un(sync=True)")
    x, dy, mask = (part[rank] for part in shares(world, 0))
    leaf = x.clone().requires_grad_()
    with Count():
        y = norm(leaf, mask)
        y.backward(dy)
    assert calls == [DIM + 1, DIM]  # sums and count, then gradient sums


# -- groups of processes -----------------------------------------------------------------------------------------------


def _groups(rank, world, expected_steps):
    """Two stages of a pipeline: ranks 0 and 1 train one norm, rank 2 another, which takes more steps."""
    group = [dist.new_group(ranks) for ranks in ([0, 1], [2])][rank == 2]
    for spec, expected in expected_steps.items():
        norm = random_norm(spec.replace("sync=True, ", "").replace("(sync=True)", ""))
        norm.sync = group
        for step in range(STEPS):
            if rank == 2:
                train_step(norm, batch(step, 3, DIM), batch(step, 3, DIM))
                train_step(norm, batch(step, 3, DIM), batch(step, 3, DIM))
                continue
            got = train_step(norm, *(part[rank] for part in shares(2, step)))
            start = sum(SIZES[:rank])
            assert_close(got["y"], expected[step]["y"][start : start + SIZES[rank]])
            assert_close(got["dx"], expected[step]["dx"][start : start + SIZES[rank]])
            assert_close(got["running"], expected[step]["running"])


def _group_survives(rank, world):
    group = dist.new_group([0, 1])
    old = nn.Sequential(nn.Conv1d(3, DIM, 1), nn.SyncBatchNorm(DIM, process_group=group), nn.SyncBatchNorm(DIM))
    for spec in ("batch", "un", "mabn", "layer"):
        norms = convert(old, spec)[1:]
        assert [getattr(norm, "sync", None) for norm in norms] == ([None] * 2 if spec == "layer" else [group, True])
        again = convert(convert(old, spec), "power(groups=0)")[1:]
        assert [norm.sync for norm in again] == ([False] * 2 if spec == "layer" else [group, True])
    assert convert(old, "un(sync=False)")[1].sync is False
    norm = convert(old, "un")[1]
    assert norm.spec == "un"
    assert "group of 2" in repr(norm)
    assert norm._without("affine").sync is group
    for twin in (copy.deepcopy(norm), copy.copy(norm), copy.deepcopy(nn.Sequential(norm))[0]):
        assert twin.sync is group
    with pytest.raises(TypeError, match="sync"):
        pickle.dumps(norm)
    with pytest.raises(ValueError, match="sync"):
        type(norm)(DIM, sync="tp")
    assert type(norm)(DIM, sync=group).sync is group


# -- DTensors ----------------------------------------------------------------------------------------------------------

SEQUENCES = (3, 5, DIM)  # 5 tokens of two processes: 3 and 2


def _dtensors(rank, world, expected_steps):
    mesh = init_device_mesh("cpu", (world,))
    for number, (spec, expected) in enumerate(expected_steps.items()):
        for placement in (Shard(1), (Shard(0), Shard(2), Replicate())[number % 3]):
            norm = distribute_module(random_norm(spec), mesh)
            for step, joint in enumerate(expected):
                x, dy, mask = sequences(step)
                x, dy = (distribute_tensor(t, mesh, [placement]) for t in (x, dy))
                x.requires_grad_()
                norm.zero_grad()
                y = norm(x, mask)
                assert (y.placements, y.shape) == (x.placements, x.shape)
                y.backward(dy)
                got = {"y": y, "dx": x.grad, **{f"d{name}": p.grad for name, p in norm.named_parameters()}}
                for name, tensor in {**got, **dict(norm.named_buffers())}.items():
                    value = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor
                    assert_close(
                        value, joint[name], msg=lambda text, n=name: f"{spec}, {placement}, {step}, {n}: {text}"
                    )
            with torch.no_grad():
                y = norm.eval()(x)
            assert y.placements == x.placements


def sequences(step):
    """Return a batch, its gradient, and a mask."""
    mask = torch.arange(5) < torch.tensor([[5], [2], [4]])
    return batch(10 * step, *SEQUENCES), batch(500 + step, *SEQUENCES), mask


def block() -> nn.Module:
    """Two projections between a norm before and one after."""
    projections = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
    return built(lambda m, x: m.after(x + m.down(m.up(m.before(x)).relu())),
                 before=nn.LayerNorm(8), **projections, after=nn.LayerNorm(8))  # fmt: skip


def _tensor_parallel_block(rank, world, state, expected):
    mesh = init_device_mesh("cpu", (world,))
    for spec, (output, running) in expected.items():
        model = convert(block(), spec)
        model.load_state_dict(state, strict=False)
        plan = {
            "before": SequenceParallel(), "after": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }  # fmt: skip
        parallelize_module(model, mesh, plan)
        x = distribute_tensor(torch.linspace(-1, 1, 96).view(2, 6, 8), mesh, [Shard(1)])
        x.requires_grad_()
        y = model(x)
        y.full_tensor().square().sum().backward()
        assert_close(y.full_tensor().detach(), output)
        found = model.after.running
        assert_close(found.to_local() if hasattr(found, "to_local") else found, running)


def _plain_parameters(rank, world):
    x = distribute_tensor(torch.ones(2, 4, DIM, dtype=torch.float64), init_device_mesh("cpu", (world,)), [Shard(1)])
    with pytest.raises(TypeError, match="weight"):
        random_norm("un")(x)


def test_two_processes_equal_one_with_the_joint_batch(tmp_path):
    joint = {spec: one_process(spec, 2) for spec in SPECS}
    workers = [(_ddp, joint, True), (_ddp, joint, False), (_fsdp, joint), (_fsdp_mixed,), (_unsynchronised,)]
    spawn(_each, 2, tmp_path, [*workers, (_one_all_reduce_a_pass,), (_group_survives,)])


def test_three_processes_and_groups_of_them(tmp_path):
    joint = {spec: one_process(spec, 3) for spec in SPECS}
    of_two = {spec: one_process(spec, 2) for spec in (SPECS[0], SPECS[2], SPECS[6])}
    spawn(_each, 3, tmp_path, [(_train_in_process, joint), (_groups, of_two)])


def test_norms_of_dtensors_and_a_block_under_tensor_parallelism(tmp_path):
    torch.manual_seed(0)
    state, steps, blocks = block().state_dict(), {}, {}
    for spec in ALL_SPECS:
        norm = random_norm(spec)
        steps[spec] = [train_step(norm, *sequences(step)) for step in range(3)]
    for spec in ("un", "mabn", "batch", "renorm"):
        model = convert(block(), spec)
        model.load_state_dict(state, strict=False)
        blocks[spec] = model(torch.linspace(-1, 1, 96).view(2, 6, 8)).detach(), model.after.running.clone()
    spawn(_each, 2, tmp_path, [(_dtensors, steps), (_tensor_parallel_block, state, blocks), (_plain_parameters,)])
