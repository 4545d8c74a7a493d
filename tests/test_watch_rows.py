"""Files of rows, several processes, and statistics of whole models."""

import pytest
import torch
import torch.distributed as dist
from test_sync import spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import normkit
from normkit import watch
from normkit.kernels import sync
from normkit.watch import Appender, Row, read, record, row_files
from normkit.watch.quantities import p_normal

ROWS = [Row(1, "a.norm", "un(window=2, warmup=3)", "rms", 0.5), Row(26, "", "", "gradient_norm", 2.0)]


def test_a_file_gives_back_its_rows(tmp_path):
    watch.write(tmp_path / "rows.csv", ROWS)
    assert watch.read(tmp_path / "rows.csv") == ROWS
    assert watch.read(tmp_path) == ROWS
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    watch.write(tmp_path / "rows.csv", [])
    assert watch.read(tmp_path) == []


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    watch.write(tmp_path / "rows.csv", ROWS)
    with (tmp_path / "rows.csv").open("a") as file:
        file.write("51,a.norm,un,rm")
    assert watch.read(tmp_path) == ROWS


@pytest.mark.parametrize("lost", [0, 7])
def test_rows_that_a_power_cut_lost_leave_a_file_that_can_be_read(lost, tmp_path):
    path = tmp_path / "rows.csv"
    watch.write(path, ROWS)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - lost])
    row_files.truncate_file(path, len(whole))
    row_files.Appender(path)(ROWS[1:])
    assert watch.read(path) == [*ROWS[: 1 if lost else 2], ROWS[1]]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "its first line"), ("a,b\n", "its first line"), ("step,site,norm,quantity,value\n1,a,b\n", "not enough"),
     ("step,site,norm,quantity,value\nx,a,b,c,1\n", "invalid literal")],
)  # fmt: skip
def test_a_file_of_another_kind_is_rejected(text, words, tmp_path):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ValueError, match=f"rows.csv is cut short or no file of rows .*{words}"):
        watch.read(tmp_path)
    with pytest.raises(ValueError, match="path"):
        watch.write(tmp_path / "rows.txt", ROWS)


def test_rows_can_go_to_a_function():
    got, model = [], nn.Sequential(nn.LayerNorm(4))
    with normkit.record(model, every=1, quantities=["rms"], to=got.extend) as rows:
        model(torch.ones(3, 4))
    assert got == list(rows) == [Row(1, "0", "LayerNorm", "rms", 1.0)]


@pytest.mark.parametrize("n", [8, 20, 150])
def test_the_test_of_normality_is_scipys(n):
    stats = pytest.importorskip("scipy.stats")
    x = torch.randn(n, 40, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x[:, 20:] = x[:, 20:].exp()
    torch.testing.assert_close(p_normal(x), torch.from_numpy(stats.normaltest(x.numpy()).pvalue))
    assert torch.isnan(p_normal(torch.ones(20)))
    with pytest.raises(ValueError, match="at least 8 values"):
        p_normal(x[:7])


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


class GemmaRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def test_gain_of_a_norm_that_stores_it_less_one():
    norm = GemmaRMSNorm(4, eps=1e-6)
    nn.init.constant_(norm.weight, 0.5)
    with normkit.record(norm, every=1, quantities=["learned_g"]) as rows:
        norm(torch.randn(3, 4))
    assert [row.value for row in rows] == [1.5]


def test_weights_are_those_of_the_forward():
    norm = nn.LayerNorm(4)
    optimizer = torch.optim.SGD(norm.parameters(), 1.0)
    with normkit.record(norm, every=1, quantities=["learned_g"]) as rows:
        norm(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        norm(torch.randn(3, 4))
    assert next(iter(rows)).value == 1.0


def test_a_failed_write_leaves_whole_lines_and_rows_of_another_run_stay(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    append = Appender(path)
    append([Row(1, "norm", "un", "rms", 0.5)])
    whole = path.read_bytes()
    monkeypatch.setattr("normkit.watch.row_files.to_csv", lambda rows, header: "9,cut\ud800")  # cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        append([Row(2, "norm", "un", "rms", 0.5)])
    assert path.read_bytes() == whole
    with pytest.raises(ValueError, match="earlier run"), record(nn.LayerNorm(4), to=path):
        pass


def test_a_path_for_rows_is_checked_first_and_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    model = nn.Sequential(nn.LayerNorm(4))
    with pytest.raises(ValueError, match="is no file"), record(model, to="folder.csv"):
        pass
    with pytest.raises(ValueError, match="is no file of rows"):
        Appender("other.csv")
    with record(model, every=1, to="rows.csv"):
        monkeypatch.chdir(tmp_path / "folder.csv")
        model(torch.randn(3, 4)).sum().backward()
    assert read(tmp_path / "rows.csv")
