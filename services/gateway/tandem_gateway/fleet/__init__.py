"""The pods, and which of them a request goes to.

pods.py       health, reports and failures of every pod, as discovery names them
pod_load.py   a pod's report as times: its backlog, its steps, the batch that a request joins
routing.py    the pods with which a request is predicted to end first; prefixes and answer lengths
unloaded.py   which objectives the pods meet without load
"""
