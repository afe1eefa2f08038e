"""The settings class of each role's process."""

from __future__ import annotations

from tandem_decode.settings import DecodeSettings
from tandem_gateway.settings import GatewaySettings
from tandem_lookahead.settings import LookaheadSettings
from tandem_prefill.settings import PrefillSettings
from tandem_service.settings import CommonSettings

SETTINGS: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "decode": DecodeSettings,
    "prefill": PrefillSettings,
    "lookahead": LookaheadSettings,
}
