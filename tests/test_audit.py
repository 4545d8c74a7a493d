"""Outcomes of norms, reported without changing the model."""

import pytest
import torch
from third_party_models import CASES, case_of, randomize
from torch import nn

from normkit.fold import audit, fold
from normkit.fold.report import Audit, Outcome
from normkit.models import convert


@pytest.mark.parametrize("name", ["llama", "torchvision_swin"])
def test_audit_predicts_fold_and_changes_nothing(name):
    case = case_of(name)
    model = randomize(convert(case.model, "un")).eval()
    before = str(model), {key: t.clone() for key, t in model.state_dict().items()}
    found = audit(model, *case.args, outputs=case.outputs, **case.kwargs)
    assert str(model) == before[0]
    for key, t in model.state_dict().items():
        assert torch.equal(t, before[1][key])
    _, report = fold(model, *case.args, outputs=case.outputs, **case.kwargs)
    assert found.rows == report.rows
    assert len(found) == len(list(found))


def test_the_table_names_readers_and_reasons():
    case = CASES["torch_encoder_pre"]()
    text = str(audit(convert(case.model, "un"), *case.args, **case.kwargs))
    for words in ("layers.0.self_attn.in_proj_weight", "model output", "4 of 5", "mask"):
        assert words in text


def test_a_line_of_a_report_has_at_most_120_characters():
    name, reader = "encoder.layer.0.attention.output.LayerNorm", "encoder.layer.0.attention.self.query"
    found = Audit(
        (Outcome(name, "un(warmup=0)", "folded", tuple(f"{reader}{i}" for i in range(9)), "a reason " * 20),),
        ("the example",),
    )
    assert max(map(len, str(found).splitlines())) <= 120
    assert (str(found).count(reader), "and 5 more" in str(found)) == (4, True)
    assert str(found).count("\n    ") >= 3, "what follows is below the norm, indented"


# -- norms that others cancel ------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Attention whose queries, keys and values are each normalized within heads, as in Gemma 4."""

    def __init__(self, eps=1e-6, bias=False, values=True):
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=bias and name == "q") for name in "qkv")
        self.q_norm, self.k_norm, v_norm = (nn.RMSNorm(4, eps=eps) for _ in range(3))
        self.v_norm = v_norm if values else nn.Identity()
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (
            norm(layer(y).unflatten(-1, (2, 4))).transpose(1, 2)
            for norm, layer in ((self.q_norm, self.q), (self.k_norm, self.k), (self.v_norm, self.v))
        )
        return x + self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def heads(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Heads(**options), nn.Linear(8, 8)).eval()
    nn.init.uniform_(model[1].norm.weight, 0.5, 1.5)
    return model


X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


def test_a_norm_that_others_cancel_goes_on_request_and_eps_makes_the_error():
    errors = []
    for eps in (1e-6, 1e-4, 1e-2):
        model = heads(eps=eps)
        row = audit(model, X).rows[0]
        assert (row.name, row.action) == ("1.norm", "gain folded")
        assert all(f"1.{name}_norm" in row.why for name in "qkv")
        stays, report = fold(model, X)
        assert isinstance(stays[1].norm, nn.RMSNorm)
        assert report.eps_error == 0
        folded, report = fold(model, X, remove_cancelled=True)
        assert isinstance(folded[1].norm, nn.Identity)
        assert report.rows[0].action == "folded"
        assert report.max_error < 1e-14
        difference = (folded.double()(X.double()) - model.double()(X.double())).abs().max()
        assert 0.1 * report.eps_error < difference < 10 * report.eps_error
        errors.append(report.eps_error)
    assert 1e-8 < errors[0] < 1e-4
    assert errors == sorted(errors)
    assert 10 < errors[1] / errors[0] < 1000


@pytest.mark.parametrize("options", [{"bias": True}, {"values": False}])
def test_a_norm_stays_where_something_else_sees_its_factor(options):
    model = heads(**options)
    assert "_norm" not in audit(model, X).rows[0].why
    folded, report = fold(model, X, remove_cancelled=True)
    assert isinstance(folded[1].norm, nn.RMSNorm)
    assert report.eps_error < 1e-14


class Flagged(nn.Sequential):
    def forward(self, x, attention_mask=None, only_norm=False, context=None, scale=1.0):
        return self[0](x) if only_norm else super().forward(x)


def test_arguments_that_the_example_does_not_have_are_named():
    model = convert(Flagged(nn.LayerNorm(4), nn.Linear(4, 4)), "un").eval()
    found = audit(model, torch.randn(3, 4))
    assert (found.absent, found.deciding) == (("attention_mask", "only_norm=False", "context", "scale=1.0"), ())
    assert audit(model, torch.randn(3, 4), None, False, scale=2.0).absent == ("attention_mask", "context")


class Deciding(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        return self[1](self[2](x) if x.mean() > -100 else x)


def test_modules_that_branch_on_values_are_named():
    model = nn.Sequential(nn.Linear(4, 4), Deciding(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)))
    assert audit(convert(model, "un").eval(), torch.randn(3, 4)).deciding == ("1",)
    assert audit(convert(model[0:1].append(nn.LayerNorm(4)), "un").eval(), torch.randn(3, 4)).deciding == ()
