"""Files of rows, several processes, and inputs that are rare in training."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_models import GemmaRMSNorm, built
from test_sync import spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision_stub import load_torchvision

import normkit
from normkit import watch
from normkit.kernels import sync
from normkit.watch import Appender, Recorder, Row, diagnose, read, record
from normkit.watch.rows import truncate_file

ROWS = [Row(1, "a.norm", "un(window=2, warmup=3)", "rms", 0.5), Row(26, "", "", "gradient_norm", 2.0)]


def test_a_file_gives_back_its_rows(tmp_path):
    watch.write(tmp_path / "rows.csv", ROWS)
    assert watch.read(tmp_path / "rows.csv") == ROWS
    assert watch.read(tmp_path) == ROWS
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    with (tmp_path / "rows.csv").open("a") as file:
        file.write("51,a.norm,un,rm")  # a line that is being written
    assert watch.read(tmp_path) == ROWS
    watch.write(tmp_path / "rows.csv", [])
    assert watch.read(tmp_path) == []


@pytest.mark.parametrize("lost", [0, 7])
def test_rows_that_a_power_cut_lost_leave_a_file_that_can_be_read(lost, tmp_path):
    path = tmp_path / "rows.csv"
    watch.write(path, ROWS)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - lost])
    truncate_file(path, len(whole))
    Appender(path)(ROWS[1:])
    assert watch.read(path) == [*ROWS[: 1 if lost else 2], ROWS[1]]


@pytest.mark.parametrize(
    "text", ["", "a,b\n", "step,site,norm,quantity,value\n1,a,b\n", "step,site,norm,quantity,value\nx,a,b,c,1\n"]
)
def test_a_file_of_another_kind_is_rejected(text, tmp_path):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ValueError, match=r"rows\.csv"):
        watch.read(tmp_path)
    with pytest.raises(ValueError, match="path"):
        watch.write(tmp_path / "rows.txt", ROWS)


def test_rows_can_go_to_a_function():
    got, model = [], nn.Sequential(nn.LayerNorm(4))
    with normkit.record(model, every=1, quantities=["rms"], to=got.extend) as rows:
        model(torch.ones(3, 4))
    assert got == list(rows) == [Row(1, "0", "LayerNorm", "rms", 1.0)]


def _two_processes(rank, world, folder):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(normkit.make("batch(sync=True)", 4), nn.LayerNorm(4)))
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(1))[rank, : 4 + 5 * rank] * (1 + rank)
    with normkit.record(model, every=1, to=f"{folder}/rows.csv") as rows:
        for _ in range(2):
            model(x).pow(3).sum().backward()
        for empty in (1, 0):  # the other process must not wait for this one for ever
            model(x[: 0 if rank == empty else None]).pow(3).sum().backward()
    assert bool(len(rows)) == (rank == 0)


@pytest.mark.skipif(not dist.is_available(), reason="this torch is built without torch.distributed")
def test_the_first_process_writes(tmp_path):
    spawn(_two_processes, 2, tmp_path, str(tmp_path))
    rows = watch.read(tmp_path)
    both = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(1))
    joint = torch.cat([both[0, :4], both[1] * 2])
    tokens = {(row.step, row.site): row.value for row in rows if row.quantity == "tokens"}
    joint_steps = {(step, "0"): 13 for step in (1, 2)} | {(3, "0"): 4}  # without a batch there is nothing to record
    assert tokens == joint_steps | {(step, "1"): 4 for step in (1, 2, 3)}, (
        "of all processes where the norm is synchronised, else of the first"
    )
    first = next(row.value for row in rows if row.quantity == "distance_mean" and row.site == "0")
    assert first == pytest.approx(float(joint.mean(0).norm() / 4), rel=1e-4)


def test_the_share_of_padding_is_that_of_one_process(monkeypatch):
    monkeypatch.setattr(sync, "groups_of", lambda synced: ("four equal processes",) if synced else ())
    monkeypatch.setattr(sync, "all_reduce", lambda sums, groups: 4 * sums if groups else sums)
    model = nn.Sequential(nn.Embedding(9, 6, padding_idx=0), normkit.make("pnv(sync=True)", 6))
    with normkit.record(model, every=1, quantities=["tokens", "padding"]) as rows:
        model(torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]]))
    assert {row.quantity: row.value for row in rows} == {"tokens": 32, "padding": pytest.approx(3 / 8)}


def test_weights_are_those_of_the_forward():
    norm, stored_less = nn.LayerNorm(4), GemmaRMSNorm(4)
    nn.init.constant_(stored_less.weight, 0.5)
    optimizer = torch.optim.SGD(norm.parameters(), 1.0)
    model = nn.Sequential(norm, stored_less)
    with normkit.record(model, every=1, quantities=["learned_g"]) as rows:
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        model(torch.randn(3, 4))
    assert [row.value for row in rows if row.step == 1] == [1.0, 1.5]


def test_a_failed_write_leaves_whole_lines_and_rows_of_another_run_stay(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    append = Appender(path)
    append([Row(1, "norm", "un", "rms", 0.5)])
    whole = path.read_bytes()
    monkeypatch.setattr("normkit.watch.rows.to_csv", lambda rows, header: "9,cut\ud800")  # cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        append([Row(2, "norm", "un", "rms", 0.5)])
    assert path.read_bytes() == whole
    with pytest.raises(ValueError, match=r"rows\.csv"), record(nn.LayerNorm(4), to=path):
        pass


def test_a_path_for_rows_is_checked_first_and_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for path in ("folder.csv", "other.csv"):
        with pytest.raises(ValueError, match=path):
            Appender(path)
    if Path("/proc/self").exists():  # no process can make a file in /proc
        with pytest.raises(OSError, match="rows"):
            Appender("/proc/rows.csv")
    model = nn.Sequential(nn.LayerNorm(4))
    with record(model, every=1, to="rows.csv"):
        monkeypatch.chdir(tmp_path / "folder.csv")
        model(torch.randn(3, 4)).sum().backward()
    assert read(tmp_path / "rows.csv")


# -- inputs that are rare in training ----------------------------------------------------------------------------------


def gaps(batches, norm=None):
    """The last recorded gap of quadratic means."""
    norm = norm or nn.LayerNorm(4)
    with record(norm, every=1) as rows:
        for x, *mask in batches:
            norm(x, *mask).sum().backward()
    return [row.value for row in rows if row.quantity == "gap_quadratic"]


@pytest.mark.parametrize("shape", [(0, 4), (0, 3, 4), (4,), (2, 0, 4)])
def test_no_token_and_a_single_one(shape):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with record(model, every=1) as rows:
        for x in (torch.randn(shape), torch.randn(3, 4)):
            model(x).sum().backward()
    assert {row.step for row in rows if row.quantity == "rms"} >= {2}


def test_a_model_may_change_its_type_and_pass_a_batch_in_inference_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with record(model, every=1, quantities="all") as rows:
        with torch.inference_mode():
            model(torch.randn(3, 4))
        for dtype in (torch.float32, torch.float64, torch.float32):
            model.to(dtype)(torch.randn(3, 4, dtype=dtype)).square().sum().backward()
    assert [row.step for row in rows if row.quantity == "gap_batch"] == [2, 3, 4]


def masked(width=4):
    return built(lambda m, x, attention_mask=None: m.norm(x), norm=nn.LayerNorm(width))


def test_a_first_batch_that_is_not_finite_or_all_padding_is_forgotten():
    torch.manual_seed(0)
    batches = [(torch.randn(64, 4),) for _ in range(6)]
    clean = gaps(batches)
    assert gaps([(torch.full((64, 4), torch.nan),), *batches])[-4:] == pytest.approx(clean[-4:], rel=0.5)
    real = [(x, torch.ones(64, dtype=torch.bool)) for (x,) in batches]
    padding = (torch.randn(64, 4), torch.zeros(64, dtype=torch.bool))
    masked = gaps([padding, *real], normkit.make("layer", 4))
    assert masked[-4:] == pytest.approx(clean[-4:], rel=0.5)


def test_a_copy_of_the_model_is_not_recorded(tmp_path):
    model = nn.Sequential(nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 6), normkit.make("un", 6))
    with record(model, every=1) as rows:
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        for forward in (model, copied := copy.deepcopy(model), loaded, model, torch.compile(copied, backend="eager")):
            forward(torch.tensor([[3, 4], [5, 0]])).sum().backward()
    assert {row.step for row in rows} == {1, 2}


@pytest.mark.parametrize(
    ("norm", "shapes"),
    [
        (nn.LocalResponseNorm(2), [(2, 3, 6, 6), (2, 3, 8, 8)]),
        (nn.InstanceNorm2d(5, affine=True), [(5, 6, 6), (2, 5, 6, 6)]),
        (built(lambda m, x: x.norm(dim=-1), kind="VectorNorm"), [(2, 8, 4)] * 2),
        (built(lambda m, x: (x * 1j).abs(), kind="ComplexNorm"), [(2, 4), (2, 6)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_only_called_a_norm_does_not_end_a_training(norm, shapes):
    model = nn.Sequential(norm)
    with record(model, every=1, quantities="all") as rows:
        for shape in shapes:
            model(torch.randn(shape, requires_grad=True)).sum().backward()
    if isinstance(norm, nn.LocalResponseNorm):
        assert [row.value for row in rows if row.quantity == "tokens"] == [2 * 6 * 6, 2 * 8 * 8]
    of_several = built(lambda m, pair: sum(pair), kind="AddNorm")
    uncalled = pytest.warns(UserWarning, match="never called")
    with uncalled, record(nn.ModuleList([of_several, nn.LayerNorm(4)]), every=1):
        of_several((torch.randn(2, 4), torch.randn(2, 4)))


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_masks_among_the_arguments_count_in_wrapped_models(wrap):
    model, mask = wrap(masked()), torch.tensor([[True] * 3 + [False] * 3] * 2)
    with record(model, every=1, quantities=["tokens"]) as rows:
        model(torch.randn(2, 6, 4), mask).sum().backward()
        model(torch.randn(2, 6, 4), attention_mask=mask.long()).sum().backward()
    assert [row.value for row in rows] == [6, 6]


def test_a_compiled_model_may_change_the_output_of_a_norm_in_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    compiled, seen = torch.compile(copy.deepcopy(model), backend="aot_eager"), []
    x = torch.randn(8, 4)
    for each in (model, compiled):
        with record(each, every=1, quantities=["gradient_norm", "rms"]) as rows:
            each(x).square().mean().backward()
        seen.append([row.value for row in rows])
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)


def test_without_running_statistics_nothing_fails_at_evaluation():
    """A norm with constant statistics, as those of detectors, is judged as one without any."""
    frozen, found = load_torchvision().ops.FrozenBatchNorm2d(4), []
    frozen.running_var.fill_(0.01)
    for norm in (nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False), frozen):
        with record(model := nn.Sequential(norm), every=1) as rows:
            for step in range(30):
                model((1 + step) * torch.randn(2, 4, 2, 2, generator=torch.Generator().manual_seed(step)))
        found.append({finding.kind for finding in diagnose(rows)})
    assert ["evaluation" in kinds for kinds in found] == [True, False, False]
    assert "tiny batches" in found[1]


def test_a_gradient_has_the_mask_of_its_own_forward():
    """Two forwards come before the first backward pass."""
    model, x, found = masked(6), torch.randn(2, 3, 6), []
    masks = [torch.tensor(rows) for rows in ([[1, 1, 0], [1, 0, 0]], [[1, 0, 0], [0, 0, 0]])]
    for together in (False, True):
        with record(model, every=1, quantities=["g_psi2"]) as rows:
            losses = []
            for mask in masks:
                losses.append((model(x, mask) * torch.arange(6.0).view(2, 3, 1)).sum())
                if not together:
                    losses.pop().backward()
            for loss in losses:
                loss.backward()
        found.append([row.value for row in rows])
    assert found[1] == found[0]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("masked", [True, False])
def test_lengths_where_time_comes_first(masked):
    real = torch.arange(10) < torch.tensor([10, 5, 5, 4])[:, None]
    found = []
    for first in (True, False):
        layer = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=first)
        model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        x = torch.randn(4, 10, 8) if first else torch.randn(10, 4, 8)
        with record(model, quantities="length", every=1) as rows:
            model(x, src_key_padding_mask=~real if masked else None)
        found.append({row.value for row in rows if row.quantity == "length"})
    assert found == [{6.0}, {6.0}] if masked else [{10.0}, {10.0}]


def test_gradients_that_are_sparse_or_overflow_in_half_precision():
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.LayerNorm(4))
    half = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)).half()
    for model, x, factor in ((sparse, torch.tensor([[1, 2, 2]]), 1), (half, torch.randn(4, 256).half(), 1500)):
        with record(model, quantities=["gradient_norm"], every=1) as rows:
            (model(x) * factor).sum().backward()
        total = torch.stack([p.grad.to_dense().float().norm() for p in model.parameters()]).norm()
        assert [row.value for row in rows] == [pytest.approx(float(total), rel=1e-3)]
    assert total > torch.finfo(torch.float16).max


def test_the_state_of_an_earlier_version_is_read():
    recorder = Recorder(nn.Sequential(nn.LayerNorm(4)), loss=nn.MSELoss())
    state = recorder.state()
    state["0"]["zero"], state["(losses)"]["moments"] = None, torch.tensor([1.0, 2.0, 4.0])
    recorder.load(state)
    recorder.losses.add_numbers(torch.ones(2, 3))
    assert recorder.losses.moments.tolist() == [[7.0], [8.0], [10.0]]
    assert recorder.norms[0].memory.zero == {}
    recorder.close(warns=False)


def test_forwards_under_functional_transforms_are_not_measured():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with record(model, every=1, quantities=["rms"]) as rows:
        model(torch.randn(3, 4))
        torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(torch.randn(5, 3, 4))
        model(torch.randn(3, 4))
    assert [row.step for row in rows] == [1, 3]
