"""Which requests run, which wait, and which are refused.

admission.py    a request from its arrival to its end
places.py       how many run at once, and the queue
judge.py        whether objectives will be met, and the retry-after of a refusal
neighbours.py   which running requests a new one would make late
batch_plan.py   when the sequences of a full batch begin and end
admitted.py     what remains of an admitted request, and by when it has to end
forecast.py     predicted times, calibrated by the errors of earlier predictions
shares.py       shares of tenants, and places kept for refused clients that return
limits.py       open calls, token rates, and the adaptive limit while nothing can be predicted
miss_cause.py   the stage in which a late request lost its time
"""
