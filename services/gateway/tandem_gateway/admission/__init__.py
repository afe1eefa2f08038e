"""Which requests run, which wait, and which are refused.

admission.py      a request from its arrival to its end
gate.py           whether a request may run: objectives, and the retry-after of a refusal
queue.py          places for requests, and the queue of those that wait
admitted.py       a request that waits or runs
objectives.py     the objectives of a request, widened where an idle system could not meet them
forecast.py       predicted times, corrected by the errors of earlier predictions
reservations.py   room for future requests: those of quieter tenants, and of refused clients that return
quotas.py         limits on open calls and token rates, checked before a request is predicted
miss_cause.py     the stage in which a late request lost its time
"""
