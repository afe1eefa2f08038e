"""A forecaster that predicts the same for each request, for tests of what is done with a prediction."""

import math
import time
from types import SimpleNamespace

from tandem_core.sampling import SamplingParams
from tandem_core.slo import SloTarget
from tandem_core.step_cost import UNKNOWN_COST, StepCost
from tandem_gateway.admission.forecast import NO_QUEUE, Forecast, Quantiles
from tandem_gateway.fleet.pod_load import Backlog, PodLoad
from tandem_gateway.fleet.routing import Route
from tandem_gateway.request import TokenizedRequest

SLO = SloTarget("chat", ttft_s=1.0, tpot_s=0.5, e2e_s=5.0)


class FixedForecaster:
    """The same forecast for each request, on one pod."""

    first_confidence, end_confidence = 0.99, 0.9

    def __init__(
        self, *, ttft: float, alone_ttft: float = 0.1, token_s: float = 0.05, is_known: bool = True
    ) -> None:
        # Four sequences run; each, the new one too, adds a fifth to the time per token.
        cost = StepCost(per_token=token_s / 5) if is_known else UNKNOWN_COST
        load = PodLoad(prefill_cost=cost, decode_cost=cost)
        self.pod = SimpleNamespace(
            backlog=Backlog(),
            in_flight=1,
            is_idle=False,
            is_fresh=True,
            load=load,
            beside=lambda: lambda num_output: 4.0,
            num_decoding=0,
            num_foreign=0,
        )
        self.ttft, self.alone_ttft, self.token_s = ttft, alone_ttft, token_s
        self.high_of_left = 1.0
        #: When a pod last failed, in monotonic seconds.
        self.failed_at = -math.inf
        self.observed = []

    def forecast(self, request: TokenizedRequest) -> Forecast:
        route = Route(
            decode=self.pod,
            prefill=(),
            computes_prompt=self.pod,
            num_decode=1,
            wait_s=self.ttft - 0.1,
            join_s=0.0,
            prefill_s=0.1,
            token_s=self.token_s,
            beside_s=0.0,
            prompts_beside=0.0,
            alone_prefill_s=self.alone_ttft,
            alone_token_s=0.04,
            lengths=(10,),
            context=100,
            num_beside=4,
        )
        return self.on_route(request, route, NO_QUEUE)

    def on_route(self, request: TokenizedRequest, route: Route, queue: Quantiles) -> Forecast:
        first_s = queue.p50 + route.ttft_s
        return Forecast(
            route,
            queue.p50,
            *2 * (Quantiles(first_s, first_s), Quantiles(first_s + 1, first_s + 1)),
        )

    def left(self, request: TokenizedRequest, route: Route, model_s: float) -> Quantiles:
        return Quantiles(model_s, self.high_of_left * model_s)

    def started(self, request, forecast, ttft_s, *, is_overtaken) -> None:
        self.observed.append(("ttft", ttft_s))

    def ended(self, request, forecast, e2e_s) -> None:
        self.observed.append(("e2e", e2e_s))

    def was_long(self, request, num_tokens, *, is_cut) -> None:
        self.observed.append(("tokens", num_tokens))

    def num_batch_places(self) -> int:
        return self.pod.load.max_batch

    def is_void(self, predicted_at: float) -> bool:
        return predicted_at < self.failed_at

    def took(self, request, route, model_s, measured_s) -> None:
        self.observed.append(("took", model_s, measured_s))


def request(slo: SloTarget = SLO, prompt: tuple[int, ...] = (1, 2, 3)) -> TokenizedRequest:
    now = time.monotonic()
    return TokenizedRequest("r", "default", prompt, SamplingParams(), slo, now, now + 600)
