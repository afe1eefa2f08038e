"""Runs a request, from its tokens to its receipt.

gateway.py            prepares a request, runs it, and completes its receipt
choices.py            runs several choices of one call
relay.py              streams from a decode pod, and from another one when the first is lost
silence.py            notices pods that send nothing
suspects.py           finds the request that crashes pods
guide_checks.py       compiles guides before admission; tenant_threads.py: threads in turns of tenants
trace_attributes.py   attributes of a call's span
"""
