"""Which requests run, which wait, and which are refused.

admission.py      a request from its arrival to its end
gate.py           whether a request may run: objectives, and the retry-after of a refusal
queue.py          places for requests, and the queue of those that wait
admitted.py       a request that waits or runs
objectives.py     the objectives of a request, widened where this system could not meet them alone
forecast.py       predicted times, corrected by the errors of earlier predictions
reservations.py   room for requests that are not here: of quieter tenants, and of refused clients that return
quotas.py         open calls and token rates, which hold before anything is predicted
miss_cause.py     the stage in which a late request lost its time
"""
