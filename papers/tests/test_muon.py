"""Muon with AdamW: which parameter is whose, and a state that continues exactly."""

import copy as copies

import torch
from normkit_papers.models.config import Model
from normkit_papers.models.lm import DecoderLM
from normkit_papers.train.muon import MuonWithAdamW
from torch.nn import functional as F


def model(fixnorm=False):
    torch.manual_seed(0)
    return DecoderLM(Model(attention="rotary", width=8, hidden=16, depth=1, heads=2, fixnorm=fixnorm), vocab=9)


def optimizer_of(lm):
    return MuonWithAdamW(lm, 0.01, momentum=0.95, betas=(0.9, 0.95), weight_decay=0.1)


def train(lm, optimizer, steps):
    for step in range(steps):
        tokens = torch.randint(9, (2, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(lm(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def test_matrices_of_blocks_are_muons_and_tables_are_not():
    for fixnorm in (False, True):
        lm = model(fixnorm)
        muon, matrices, _ = (group["params"] for group in optimizer_of(lm).param_groups)
        assert len(muon) == 6  # query, key, value, out, inner, outer
        assert [tuple(p.shape) for p in matrices] == [(9, 8)]


def test_a_loaded_state_continues_and_follows_the_learning_rate():
    whole, part, copy = model(), model(), model()
    first, second = optimizer_of(part), optimizer_of(copy)
    train(part, first, 3)
    copy.load_state_dict(part.state_dict())
    second.load_state_dict(copies.deepcopy(first.state_dict()))
    for each in (first, second):
        for group in each.param_groups:
            group["lr"] = 0.003
    train(part, first, 3)
    train(copy, second, 3)
    assert all(torch.equal(a, b) for a, b in zip(part.parameters(), copy.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(part.parameters(), whole.parameters(), strict=True) if a.dim() > 1)
