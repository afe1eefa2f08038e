"""`tandem plan`: how many pods of each role a workload needs to keep its objectives, and what limits it.

costs.py      step costs from a GPU's data sheet (roofline)
measured.py   costs and settings that the pods of a running system report
workload.py   arrivals and lengths: given, or of a recorded trace
fleet_plan.py a candidate fleet: pods, costs and limits
simulate.py   discrete-event simulation of a fleet
search.py     the smallest fleet that keeps the objectives, and its limiting resource
overlay.py    a kustomize overlay with the answer
command.py    the command and its report
"""
