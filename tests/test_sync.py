"""Statistics over several processes on gloo, with unequal numbers of tokens."""

from multiprocessing import set_forkserver_preload

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from norm_cases import DIM, batch, random_norm, train_step
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

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


def joint_results(record_property, world: int) -> dict[str, list[dict]]:
    """Return the joint results of every norm, and record the norms for the table of laws."""
    for spec in SPECS:
        record_property("norm", spec)
    return {spec: one_process(spec, world) for spec in SPECS}


@pytest.mark.parametrize("world", [2, 3])
def test_processes_equal_one_process_with_the_joint_batch(world, tmp_path, record_property):
    spawn(_train_in_process, world, tmp_path, joint_results(record_property, world))


def _ddp(rank, world, broadcast, expected_steps):
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


@pytest.mark.parametrize("broadcast", [True, False])
def test_under_ddp_with_and_without_broadcast_buffers(broadcast, tmp_path, record_property):
    spawn(_ddp, 2, tmp_path, broadcast, joint_results(record_property, 2))


def _fsdp(rank, world, expected_steps):
    start = sum(SIZES[:rank])
    for spec, expected in expected_steps.items():
        norm = random_norm(spec)
        fully_shard(norm, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
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


def test_under_fsdp2(tmp_path, record_property):
    spawn(_fsdp, 2, tmp_path, joint_results(record_property, 2))


def _fsdp_mixed(rank, world):
    norm = random_norm("un(sync=True, window=2, warmup=2)", dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    fully_shard(norm, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)), mp_policy=policy)
    for step in range(3):
        y = norm(batch(step, 6, DIM, dtype=torch.float32))
        assert y.dtype is torch.bfloat16
    assert all(b.dtype in (torch.float32, torch.int64) for b in norm.buffers())


def test_state_stays_float32_under_fsdp2_mixed_precision(tmp_path):
    spawn(_fsdp_mixed, 2, tmp_path)


def _unsynchronised(rank, world):
    norm = random_norm("pnv")
    train_step(norm, *(part[rank] for part in shares(world, 0)))
    gathered = [torch.empty_like(norm.running) for _ in range(world)]
    dist.all_gather(gathered, norm.running)
    assert not torch.allclose(*gathered)


def test_without_sync_every_process_keeps_its_own_statistics(tmp_path):
    spawn(_unsynchronised, 2, tmp_path)


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


def test_one_small_all_reduce_a_pass(tmp_path):
    spawn(_one_all_reduce_a_pass, 2, tmp_path)
