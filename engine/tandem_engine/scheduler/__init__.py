"""Decides what each step computes. `core` describes the life cycle; other parts need to read only it.

core        Scheduler: requests enter and leave; steps are planned and applied
queues      which requests wait, run or receive KV; admission and preemption
sequences   what one sequence computes in a step, a check of the result, and when its text ends
config      limits, reservations, counts
"""

from tandem_engine.scheduler.config import PromptWork, RequestCounts, Reservation, SchedulerConfig
from tandem_engine.scheduler.core import Scheduler
from tandem_engine.scheduler.sequences import RequestUpdate, VerifiedTokens, append_tokens, text_end

__all__ = [
    "PromptWork",
    "RequestCounts",
    "RequestUpdate",
    "Reservation",
    "Scheduler",
    "SchedulerConfig",
    "VerifiedTokens",
    "append_tokens",
    "text_end",
]
