"""The pods, and the choice of pods for a request.

pods.py             health, reports and failures of the discovered pods
load.py             the work of a pod: its last report, and this gateway's requests since
routing.py          the choice of the pods with which a request is predicted to end first
prefix_index.py     prompts that each pod probably has in its prefix cache
output_lengths.py   expected lengths of answers
unloaded.py         the objectives that an idle system meets
"""
