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


def test_a_pod_counts_shared_text_only_if_it_has_a_lookahead_service() -> None:
    flags = ["--model", "m", "--shared-text-bytes", str(64 << 20)]
    alone = load(DecodeSettings, flags)
    sharing = load(DecodeSettings, [*flags, "--lookahead", "lookahead:21400"])
    assert alone.engine_config(max_draft_nodes=7).shared_text_bytes == 0
    assert sharing.engine_config(max_draft_nodes=7).shared_text_bytes == 64 << 20
