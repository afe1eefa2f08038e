"""Decides what each step computes. `core` tells the life cycle; it is all that other parts need to read.

core        Scheduler: requests enter and leave, steps are made and booked
queues      who waits, runs, or is being filled; admission and preemption
sequences   what one sequence computes in a step, and whether what came back fits it
finishing   when a text ends
config      limits, reservations, books
"""

from tandem_engine.scheduler.config import Reservation, SchedulerBooks, SchedulerConfig
from tandem_engine.scheduler.core import Scheduler
from tandem_engine.scheduler.finishing import Progress, VerifiedTokens

__all__ = ["Progress", "Reservation", "Scheduler", "SchedulerBooks", "SchedulerConfig", "VerifiedTokens"]
