"""An error of hcx itself is never taken for one of the user's model, and leaves the command line with its own code."""

from __future__ import annotations

import pytest
import torch
from hcx.cli.main import main
from hcx.rewrite import TraceError, trace
from hcx.rewrite.errors import HcxError, is_own_fault, let_through
from hcx.rewrite.tracing import agreement, attempt, capture, exporting, modes, tracer

from tests.conftest import tiny_llama, token_ids


class Oops(Exception):
    pass


_scope = {"__name__": "hcx.sabotage", "Oops": Oops}  # the module of the innermost frame decides
exec("def broken(*args, **kwargs):\n    raise Oops('a bug')\n", _scope)
broken = _scope["broken"]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(2, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (attempt, "cached_calls"),
        (tracer, "probe"),
        (tracer, "exported_flat"),
        (tracer, "flat_graph"),
        (tracer, "shapes_of"),
        (tracer, "must_agree"),
        (tracer, "record_modes"),
        (tracer, "limits_of"),
        (tracer, "free_constants"),
        (exporting, "own_cache"),
        (agreement, "close"),
        (capture, "reference_mode"),
        (modes, "invoke"),
    ],
)
def test_a_fault_of_tracing_surfaces(model, monkeypatch, module, name):
    """Before, each of these made a Program without a cache, or without a train mode, with a note."""
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(Oops):
        trace(model, (token_ids(12).reshape(2, 6),))


class Refuses(torch.nn.Module):
    def forward(self, x):
        raise ValueError("the model's own")


def test_what_the_model_raises_is_a_finding():
    with pytest.raises(TraceError, match="the model itself fails on the example: ValueError: the model's own"):
        trace(Refuses(), (torch.zeros(2, 3),))


def test_whose_fault_it_is():
    def raised(function):
        try:
            function()
        except Exception as error:  # noqa: BLE001  that is what is looked at
            return error

    theirs, ours = raised(lambda: torch.zeros(2) @ torch.zeros(3)), raised(broken)
    finding = raised(lambda: (_ for _ in ()).throw(HcxError("found")))
    assert [is_own_fault(e) for e in (theirs, ours, finding)] == [False, True, False]
    let_through(theirs), let_through(finding)
    with pytest.raises(Oops):
        let_through(ours)


def test_the_command_line_says_that_it_is_a_bug(tmp_path, monkeypatch, capsys):
    torch.save(torch.nn.Linear(3, 3).state_dict(), tmp_path / "net.pt")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(3, 3), (torch.zeros(2, 3),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tracer, "must_agree", broken)
    assert main(["inspect", "nets:make"]) == 70
    assert "internal error: Oops: a bug" in capsys.readouterr().err
