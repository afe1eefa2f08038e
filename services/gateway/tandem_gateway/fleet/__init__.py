"""The pods, and the choice of pods for a request.

pods.py       health, reports and failures of the discovered pods
pod_load.py   a pod's report as times: its backlog, its steps, the batch that a request joins
routing.py    chooses the pods with the earliest predicted end; prefixes and answer lengths
unloaded.py   which objectives the pods meet without load
"""
