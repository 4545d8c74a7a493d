"""State moves when the optimizer steps, by all batches since the step before."""

import copy
import gc

import pytest
import torch
from norm_cases import DIM, STAT_SPECS, batch, random_norm, train_step
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
from torch.testing import assert_close
from torchvision_stub import load_torchvision

import normkit as nk
from normkit.norms import make


def buffers(norm):
    return {name: t.clone() for name, t in norm.state_dict().items()}


@pytest.mark.parametrize("spec", STAT_SPECS)
def test_state_moves_once_a_step_by_the_joint_batch(spec):
    """Each batch is standardized as by a norm that does not follow."""
    parts, whole = random_norm(spec), random_norm(spec)
    _, optimizer = followed(parts)
    for i in range(4):
        sizes = (2, 5, 3)
        xs = [batch(9 * i + j, n, DIM) for j, n in enumerate(sizes)]
        dys = [batch(99 + j, n, DIM) for j, n in enumerate(sizes)]
        before = buffers(parts)
        for x, dy in zip(xs, dys, strict=True):
            alone = train_step(copy.deepcopy(parts), x, dy)
            together = train_step(parts, x, dy)
            for key in ("y", "dx", *(f"d{name}" for name, _ in parts.named_parameters())):
                assert_close(together[key], alone[key], msg=lambda text, key=key: f"{key}: {text}")
        assert all(torch.equal(t, before[key]) for key, t in buffers(parts).items()), "no step, no new state"
        optimizer.step()
        train_step(whole, torch.cat(xs), torch.cat(dys))
        assert int(parts.step) == int(whole.step) == i + 1
        if i == 0 or spec.startswith(("batch", "pnv", "renorm")):  # later, others have normalized by other values
            all_state = spec.startswith(("batch", "renorm"))
            for name in buffers(whole) if all_state else {"running", "window_x"} & buffers(whole).keys():
                if name not in dict(whole.named_parameters()) and not name.startswith("skipped"):
                    assert_close(getattr(parts, name), getattr(whole, name), msg=lambda t, name=name: f"{name}: {t}")


def test_nu_moves_by_the_gamma_of_all_batches_together():
    """Equation 13: Gamma is the mean of 1 and 9."""
    norm, optimizer = followed(make("power(groups=0, warmup=0, eps=0.0)", 1))
    norm.nu.fill_(1.0)
    for value in (1.0, 3.0):
        (norm(torch.full((4, 1), value).requires_grad_()) * 0).sum().backward()
    optimizer.step()
    assert_close(norm.nu, torch.full((1, 1), 1 - 0.1 * 5))


def tiny(spec="un(warmup=2, window=2)"):
    torch.manual_seed(0)
    return nn.Sequential(make(spec, 4), nn.Linear(4, 4), make(spec, 4), nn.Linear(4, 1))


def followed(model, lr=0.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    nk.follow_optimizer(model, optimizer)
    return model, optimizer


def draw(seed):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def run_epochs(model, optimizer, epochs=2, batches=7, every=3):
    """A loop as `Trainer` runs it: the last group of an epoch is shorter."""
    for epoch in range(epochs):
        for i in range(batches):
            model(draw(100 * epoch + i)).square().mean().backward()
            if (i + 1) % every == 0 or i + 1 == batches:
                optimizer.step()
                optimizer.zero_grad()


def test_optimizer_created_later_is_followed():
    model, other = tiny(), tiny()
    nk.follow_optimizer(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run_epochs(model, optimizer)
    assert [norm.step.item() for norm in (model[0], model[2])] == [6, 6]
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    model(torch.randn(6, 4)).mean().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert model[0].step == 6, "another model's optimizer moves nothing"
    halves = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model[1], model[3])]
    for half in halves:
        half.step()
    assert model[0].step == 7, "two optimizers of one model move the state once"


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on loaders
def test_lightning_with_accumulation_moves_state_as_a_plain_loop(tmp_path):
    load_torchvision()  # torchmetrics, which Lightning imports, imports it
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = tiny()

        def training_step(self, x, index):
            return self.inner(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module, plain = Module(), tiny()
    nk.follow_optimizer(module)
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=3, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader([draw(i) for i in range(7)], batch_size=None))
    _, optimizer = followed(plain)
    run_epochs(plain, optimizer, epochs=1)
    assert module.inner[0].step == 3
    for (name, mine), theirs in zip(buffers(plain).items(), buffers(module.inner).values(), strict=True):
        if not name.endswith(("window_g", "psi")):  # Lightning divides the loss by 3
            assert_close(theirs, mine, msg=name)


def test_remove_restores_the_default_and_frees_the_model():
    model = tiny()
    link = nk.follow_optimizer(model)
    link.remove()
    run_epochs(model, torch.optim.SGD(model.parameters(), lr=0.0), epochs=1)
    assert model[0].step == 7
    assert not any("next_" in name or "pending" in name for name, _ in model.named_buffers())
    gc.collect()
    before = len(hooks)
    nk.follow_optimizer(model)
    assert len(hooks) == before + 1
    del model
    gc.collect()
    assert len(hooks) == before


@pytest.mark.parametrize("spec", ["un(warmup=2, window=2)", "power"])
def test_checkpoints_do_not_change(spec):
    model, plain = tiny(spec), tiny(spec)
    _, optimizer = followed(model, lr=0.1)
    run_epochs(model, optimizer)
    assert model.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(model.state_dict())
    again, optimizer = followed(tiny(spec), lr=0.1)
    again(torch.randn(6, 4)).mean().backward()
    again.load_state_dict(plain.state_dict())  # what was pending belongs to the old weights
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(t, model.state_dict()[key]) for key, t in again.state_dict().items())


def test_a_warm_up_that_has_ended_stays_so_when_resumed_and_starts_again_when_reset():
    def run(norm, optimizer, steps):
        for i in steps:
            norm(draw(i)).square().mean().backward()
            optimizer.step()

    trained, resumed = make("un", 4), make("un", 4)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
    run(trained, optimizer, range(150))
    nk.follow_optimizer(trained, optimizer)
    follower = torch.optim.SGD(resumed.parameters(), lr=0.0)
    nk.follow_optimizer(resumed, follower)
    resumed.load_state_dict(trained.state_dict())
    run(trained, optimizer, range(150, 153))
    run(resumed, follower, range(150, 153))
    assert resumed.warmup_end > 0
    for key, t in trained.state_dict().items():
        assert_close(resumed.state_dict()[key], t, msg=lambda text, key=key: f"{key}: {text}")
    trained.reset_warmup()
    run(trained, optimizer, range(3))
    assert trained.warmup_end == 0 < trained.lag


def test_unusable_batches_and_skipped_steps_move_nothing():
    model, optimizer = followed(tiny("batch"))
    model(torch.full((3, 4), float("inf")))
    optimizer.step()
    assert (model[0].step, model[0].skipped) == (0, 1)
    x = torch.randn(8, 4)
    model(x)
    model(torch.full((3, 4), float("nan")))
    optimizer.step()
    assert model[0].step == 1
    assert_close(model[0].running[0], 0.1 * x.mean(0))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_grad_scaler_skips_moves_nothing(fused):
    model = tiny("batch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    nk.follow_optimizer(model, optimizer)
    for factor, steps in ((float("inf"), 0), (1.0, 1)):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert model[0].step == steps


@pytest.mark.parametrize("parametrized", [False, True])
def test_a_copy_moves_its_state_by_itself_until_it_follows_too(parametrized):
    model = tiny("batch")
    if parametrized:
        nn.utils.parametrizations.spectral_norm(model[0], "weight")
    nk.follow_optimizer(model)
    model(torch.randn(8, 4)).sum().backward()
    twin, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
    twin(torch.randn(8, 4))
    assert (model[0].step, twin[0].step) == (0, 1)
    nk.follow_optimizer(twin)
    run_epochs(twin, torch.optim.SGD(twin.parameters(), lr=0.0), epochs=1)
    assert (model[0].step, twin[0].step) == (0, 4)
    run_epochs(model, torch.optim.SGD(model.parameters(), lr=0.0), epochs=1)
    average.update_parameters(model)  # pairs the buffers of both by their places
    assert_close(average.module[0].running, model[0].running)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
def test_a_compiled_model_follows_too():
    eager = tiny()
    twin = copy.deepcopy(eager)
    for model, run in ((eager, eager), (twin, torch.compile(twin, backend="aot_eager", fullgraph=True))):
        _, optimizer = followed(model, lr=0.1)
        run_epochs(run, optimizer)
    for (name, mine), theirs in zip(eager.state_dict().items(), twin.state_dict().values(), strict=True):
        assert_close(theirs, mine, msg=name)
    assert eager[0].step == 6


def test_norms_that_come_later_follow_from_the_next_step_on():
    model, optimizer = followed(nn.Sequential(make("pnv", 4), nn.Linear(4, 1)))
    model.insert(0, make("pnv", 4))
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    assert model[0].step == 2 + 1  # alone until the first step, then together


def test_calibrated_statistics_outlive_the_next_step_of_the_optimizer():
    model, optimizer = followed(tiny())
    x = torch.randn(8, 4)
    model(x).sum().backward()
    nk.calibrate(model, [5 * x], inplace=True)
    calibrated = model[0].running.clone()
    optimizer.step()
    assert_close(model[0].running, calibrated, rtol=0, atol=0)


def test_bad_input_and_an_optimizer_of_another_model_raise():
    original = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    optimizer, model = torch.optim.SGD(original.parameters(), 0.1), nk.convert(original, "un")
    for given, error, named in (
        ((original,), ValueError, "norm"), ((model, 0.1), TypeError, "optimizer"),
        ((model, optimizer), ValueError, "model"),
    ):  # fmt: skip
        with pytest.raises(error, match=named):
            nk.follow_optimizer(*given)
    assert not model[1].follows_optimizer
    nk.follow_optimizer(model.requires_grad_(requires_grad=False), optimizer).remove()  # of a head beside it


def test_an_optimizer_that_accelerate_prepared_is_followed():
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    nk.follow_optimizer(model, optimizer)
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(6, 4)).square().mean())
            optimizer.step()
    assert model[0].step == 2


def test_an_optimizer_that_steps_another_one_is_followed():
    class TwoSteps(torch.optim.Optimizer):  # as SAM: its own `step` is never called
        def __init__(self, params):
            super().__init__(params, {})
            self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)

        def second_step(self):
            self.base_optimizer.step()

    model = tiny()
    optimizer = TwoSteps(model.parameters())
    nk.follow_optimizer(model, optimizer)
    for _ in range(3):
        for _ in range(2):
            model(torch.randn(6, 4)).square().mean().backward()
        optimizer.second_step()
    assert model[0].step == 3


def test_a_second_link_replaces_the_first():
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nk.follow_optimizer(model, optimizer)
    nk.follow_optimizer(model, optimizer).remove()
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    assert not model[0].follows_optimizer
