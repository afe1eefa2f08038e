"""`tandem plan`: how many pods of each role a workload needs to keep its objectives, and what decides that.

costs.py      what steps cost: measured by running pods, or from a GPU's data sheet (roofline)
measured.py   costs and settings that the pods of a running system report
workload.py   arrivals and lengths: given, or of a recorded trace
simulate.py   the fleet as a discrete-event simulation of prefill and decode pods
search.py     the fewest pods that keep the objectives; the limit that decides
overlay.py    a kustomize overlay with the answer
command.py    the command and its report
"""
