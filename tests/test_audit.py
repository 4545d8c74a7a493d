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
    assert str(found).count(reader) == 4
    assert str(found).count("\n    ") >= 3, "what follows is below the norm, indented"


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
