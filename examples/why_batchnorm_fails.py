"""Measure how far batch statistics on text are from the running statistics.

It compares batches with and without bucketing by length.

There is no training: an encoder makes one pass over real words in two kinds of batches. Needs `pip install -e
".[data]"`.
"""

import statistics

import torch
from normkit_papers.data.batches import batches_of, pad
from normkit_papers.data.embedded import cmudict
from normkit_papers.models.config import Model
from normkit_papers.models.mt import Seq2Seq

import normkit as nk

words = [source for source, _ in cmudict().train][:20_000]
lengths = [len(word) for word in words]
for bucketing in (False, True):
    torch.manual_seed(0)
    model = Seq2Seq(Model(width=64, hidden=128, depth=2, heads=4, norm="pnv"), source_vocab=40, target_vocab=50)
    with nk.record(model.encoder, every=1, quantities="distance_quadratic") as rows, torch.no_grad():
        for batch in batches_of(lengths, tokens=2000, bucketing=bucketing)[:40]:
            model.encode(pad([words[i] for i in batch]))
    late = [row for row in rows if row.step > 20]  # after the running average's start
    print("batches of one length" if bucketing else "batches of any length")
    for site in sorted({row.site for row in late}):
        distance = statistics.mean(row.value for row in late if row.site == site)
        print(f"    {site:28} distance to running {distance:.5f}")
