"""The decode pod's flags as operators write them."""

import pytest
from tandem_core.speculation import SpeculationMode
from tandem_decode.settings import DecodeSettings
from tandem_service.settings import load


def test_help_shows_the_speculation_modes_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(DecodeSettings, ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"--speculation {{{','.join(SpeculationMode)}}} sources of drafts" in shown
    assert "(default: global)" in shown
    for mode in SpeculationMode:
        assert load(DecodeSettings, ["--model", "m", "--speculation", mode.value]).speculation == mode
