"""Lengths of source and target in the batches: what they predict for batch statistics."""

import pytest
import torch
from normkit_papers.data.batches import batches_of
from torch import nn

from normkit.watch import NOT_CHECKED, Recorder, Row, advise, diagnose, record
from normkit.watch.length import target_share
from normkit.watch.recording import as_recording


def pairs(by, gap=0.2, steps=200):
    """Rows of two norms; batches are bucketed by the first columns of pairs of lengths."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(4, 12, (8000,), generator=generator)
    both = torch.stack([source, source + torch.randint(2, (8000,), generator=generator)], 1).numpy()
    batches = batches_of(both.sum(1), 500, bucketing=by > 0, by=both[:, :by])
    for step, items in enumerate(batches[:steps]):
        for site, lengths in zip(("encoder", "decoder"), both[items].T, strict=True):
            values = {"length": lengths.mean(), "length_spread": lengths.std(), "gap_batch": gap, "gap_quadratic": 0.1}
            for name, value in {**values, "length_share": 0.5}.items():
                yield Row(step + 1, site, "LayerNorm", name, float(value))


def test_share_of_target_lengths_between_batches():
    """Batches of 31 pairs, two lengths of targets for each source: 1 / 31 is chance."""
    shuffled, by_source, by_both = (target_share(as_recording(pairs(by))) for by in (0, 1, 2))
    assert shuffled < 0.01, "sources of all lengths add to the variance in a batch"
    assert by_source == pytest.approx(1 / 31, abs=0.015)
    assert by_both > 0.5


def test_advice_by_the_lengths_of_targets():
    start = "encoder, decoder: BatchNorm would be off by 20 % at evaluation, PN-V and UN by 10 %; "
    [both], [source], [shuffled] = (advise(pairs(by)) for by in (2, 1, 0))
    assert both.startswith(f"{start}BatchNorm and PN-V would fail, as 8")
    assert both.endswith(
        " % of the variance of target lengths, given source lengths, is between batches; UN would hold"
    )
    assert source.startswith(f"{start}whether the model would hold is not known"), "near the threshold"
    assert shuffled.startswith(f"{start}all three would hold, as 0 % of the variance of target lengths")
    assert advise(pairs(1, gap=0.3))[0].endswith("whether the model would hold is not known")
    assert advise(pairs(2, steps=9))[0].endswith("whether the model would hold is not known")


def test_no_finding_if_target_lengths_follow_from_the_sources():
    for by, expected in ((1, set()), (2, {"batch length"})):
        found = diagnose(row._replace(norm="batch") for row in pairs(by))
        assert {finding.kind for finding in found} - {NOT_CHECKED} == expected


def test_masks_of_past_steps_are_freed():
    """Also in a loop that counts the steps itself, as the Lightning callback does."""
    model = nn.Sequential(nn.Embedding(3, 2, padding_idx=0), nn.LayerNorm(2))
    recorder = Recorder(model, 1, "length")
    for ids in ([[1, 0]], [[1, 2]], [[0, 0]]):
        recorder.begin_step()
        model(torch.tensor(ids))
        recorder.end_forward()
    assert [row.value for row in recorder.rows] == [1, 2, 0]
    assert len(recorder.padding.real) == 1
    recorder.close()


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x, attention_mask):
        return self.norm(x)


def test_a_gradient_has_the_mask_of_its_own_forward():
    """Two forwards come before the first backward pass."""
    model, x, found = Masked(), torch.randn(2, 3, 6), []
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


def test_lengths_that_follow_from_the_sources_are_no_finding():
    """A batch has one length, and the last norm sees one token more, as with a class token."""
    rows = []
    for step in range(12):
        values = {"encoder": 5.0 + step % 3, "decoder": 6.0 + step % 3}
        rows += [Row(step, site, "batch", "length", value) for site, value in values.items()]
        rows += [Row(step, site, "batch", "length_spread", 0.0) for site in values]
    assert target_share(as_recording(rows)) == 0


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
